"""The page of the race of residual networks: what is drawn is what was measured."""

import pytest
from depth_examples import depth, outcome, whole

from batchnorm.lab.depth.figures import FIGURES, accuracy, curve, headline, rates, tables
from batchnorm.lab.depth.outcome import depth_of
from batchnorm.lab.depth.records import to_records
from batchnorm.records import RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import page


@pytest.fixture(scope="module")
def records():
    return RecordFile.from_json(to_records(whole(), threads=2).to_json())


def test_the_first_screen_is_the_sentence_and_the_bars(records):
    drawn = headline.draw(records)
    assert drawn.title == "With Batch Normalization: 10 steps. Without: 90. 9.0x fewer."
    assert drawn.sentence.startswith("Confirmed. Steps to 90.0%")
    assert [(bar.name, bar.length, bar.text) for bar in drawn.bars][:4] == [
        ("without BN", 90, "90"),
        ("BN x1", 60, "60"),
        ("BN x5", 30, "30"),
        ("BN x30", 10, "10"),
    ]
    text = page([Run("race", records)])
    assert (
        text.index("9.0x fewer")
        < text.index('class="lengths"')
        < text.index("Accuracy over the steps", text.index("<main"))
    )
    assert "--part: 0.1111" in text


def test_an_arm_that_never_arrives_has_no_bar():
    never = (200,) * 5
    race = to_records(outcome(*depth(10, (80,) * 5, never, (20,) * 5, never)), threads=2)
    bars = {bar.name: bar for bar in headline.draw(race).bars}
    assert (bars["BN x1"].length, bars["BN x1"].text) == (0, "never: best 20.0%")
    assert bars["BN x5"].text == "20"


def test_accuracy_over_the_steps(records):
    drawn = accuracy.draw(records)
    lines = {t["name"]: t for t in drawn.figure["data"] if t["meta"]["part"] == "line"}
    marks = {t["name"]: t for t in drawn.figure["data"] if t["meta"]["part"] == "diamond"}
    assert list(lines)[:5] == ["without BN", "BN x1", "BN x5", "BN x30", "SkipInit"]
    assert lines["BN x5"]["y"] == [0.2, 0.2, *[0.95] * 8]
    assert (marks["BN x5"]["x"], marks["BN x5"]["y"]) == ([30], [0.9])
    assert drawn.table.rows[2][:4] == ("30", "20.0%", "20.0%", "95.0%")
    for name, mark in marks.items():
        assert mark["meta"]["colour"] == lines[name]["meta"]["colour"]


def test_the_ratio_against_depth_has_the_papers_figure_beside_it(records):
    drawn = curve.draw(records)
    lines = {t["name"]: t for t in drawn.figure["data"] if t["meta"]["part"] == "line"}
    assert lines["BN x5"]["x"] == [2, 6, 10]  # at 14 blocks the plain network does not train
    assert lines["BN x5"]["y"] == pytest.approx([2.0, 3.0, 3.0])
    paper = next(line for name, line in lines.items() if "the paper" in name)
    assert paper["y"] == [14.8, 14.8]
    assert "At 14 blocks the network without BN does not train" in drawn.notes[0]
    assert drawn.table.rows[-1][2] == "20.0%: untrained"


def test_a_single_depth_has_no_curve():
    race = to_records(outcome(*depth(10, (80,) * 5, (60,) * 5, (20,) * 5, (20,) * 5)), threads=2)
    assert curve.draw(race) is None


def test_claims_and_the_table_of_figure_3(records):
    drawn = tables.claims(records)
    assert [row[1] for row in drawn.rows] == ["confirmed"] * 5
    table = tables.arms(records)
    rows = {row[0]: row for row in table.rows}
    assert rows["BN x5"][2] == "30 (5/5)\n20-30"
    assert rows["the paper, ImageNet: BN-x5"][3] == "14.8x"
    assert all(table.rows[index][0].startswith("the paper") for index in table.muted)
    assert sum(row[0].startswith("the paper") for row in table.rows) == len(table.muted)


def test_the_rates_say_where_seeds_diverge(records):
    drawn = rates.draw(records)
    cells = dict(zip(drawn.table.columns[1:], drawn.table.rows[0][1:], strict=True))
    assert drawn.table.rows[0][0] == "without BN"
    assert (cells["0.1"], cells["0.2"], cells["3"]) == ("90.0%", "0.0%*", "")
    lines = {line["name"]: line for line in drawn.figure["data"]}
    plain = dict(zip(lines["without BN"]["x"], lines["without BN"]["marker"]["symbol"], strict=True))
    assert (plain[0.1], plain[0.2]) == ("circle", "circle-open")
    assert drawn.figure["layout"]["xaxis"]["type"] == "log"  # one axis of rates for all networks


def test_a_race_that_measured_nothing_is_a_page_all_the_same():
    empty = to_records(outcome(), threads=2)
    assert [draw(empty) is None for draw in FIGURES] == [False, True, True, False, True, True]
    assert "No arm was finished." in page([Run("race", empty)])
    assert depth_of(outcome(), 10) is None
