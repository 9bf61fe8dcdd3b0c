"""Two runs on one page: named after what differs, their lines in one chart, everything else run by run."""

import pytest

from batchnorm.lab.options import Options
from batchnorm.lab.race import run as run_race
from batchnorm.lab.records import to_records
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import page
from batchnorm.report.sections import Headline, Line, Panel, Panels, Plot, Table
from batchnorm.report.together import joined, named, options_of, overlaid, together


def records(**configuration):
    return RecordFile("probe", configuration, (), machine={})


def names(*runs):
    return [run.name for run in named(runs)]


def test_runs_are_named_after_what_differs():
    one, other = records(rate=0.1, norm="batch", threads=1), records(rate=0.3, norm="batch", threads=2)
    assert names(Run("a", one), Run("b", other)) == ["rate 0.1", "rate 0.3"]


def test_what_a_command_was_asked_for_counts_not_what_follows_from_it():
    runs = [
        Run("race", records(asked={"experiment": f"race {n}", "steps": n, "depths": [2, n]}, evaluated_at=[n]))
        for n in (10, 20)
    ]
    assert names(*runs) == ["steps 10, depths 2, 10", "steps 20, depths 2, 20"]


def test_an_option_that_one_run_lacks():
    assert names(Run("a", records(lr=1.0)), Run("b", records())) == ["lr 1", "lr -"]


def test_runs_that_do_not_differ_keep_the_names_of_their_files():
    assert names(Run("a", records()), Run("b", records())) == ["a", "b"]
    assert names(Run("a", records()), Run("a", records())) == ["a (1)", "a (2)"]
    assert names(Run("a", records(seed=0)), Run("b", records(seed=0)), Run("c", records(seed=1))) == [
        "seed 0 (1)", "seed 0 (2)", "seed 1",
    ]  # fmt: skip


def test_runs_of_different_commands_keep_the_names_of_their_files():
    assert names(Run("a", records(seed=0)), Run("b", RecordFile("watch", {"seed": 1}, ()))) == ["a", "b"]


def test_long_options_name_nothing():
    assert [key for key, _ in options_of({"layers": "x" * 41, "seed": 1, "nested": {}})] == ["seed"]


def chart(*lines, **options):
    return Panels("Found.", "", (Panel("loss", lines, "step", **options),), table=Table("", "", ("a",), (("1",),)))


def test_lines_of_one_color_are_told_apart_by_run():
    line = Line("", (0, 1), (1.0, 2.0), "blue")
    (panel,) = overlaid(["rate 1", "rate 2"], [chart(line), chart(line)]).panels
    assert [each.name for each in panel.lines] == ["rate 1", "rate 2"]
    assert len({each.colour for each in panel.lines}) == 2


def test_where_color_says_the_network_the_dash_says_the_run():
    pair = Line("with BN", (0, 1), (1.0, 2.0), "blue"), Line("without BN", (0, 1), (1.0, 2.0), "vermillion")
    panel = joined(["rate 1", "rate 2"], [chart(*pair).panels[0]] * 2)
    assert [(each.name, each.colour, each.dash) for each in panel.lines] == [
        ("with BN, rate 1", "blue", "solid"),
        ("without BN, rate 1", "vermillion", "solid"),
        ("with BN, rate 2", "blue", "dash"),
        ("without BN, rate 2", "vermillion", "dash"),
    ]


def test_a_reference_is_drawn_once():
    both = Line("limit", (0, 1), (1.0, 1.0), "ink"), Line("", (0, 1), (1.0, 2.0), "blue")
    assert [each.name for each in joined(["a", "b"], [chart(*both).panels[0]] * 2).lines] == ["limit", "a", "b"]


def test_the_axis_holds_both_runs():
    line = Line("", (0, 1), (1.0, 2.0), "blue")
    panels = [chart(line, y_range=span).panels[0] for span in ((0.0, 1.0), (-3.0, 0.5))]
    assert joined(["a", "b"], panels).y_range == (-3.0, 1.0)


def test_maps_stand_side_by_side_under_the_names_of_their_runs():
    panels = overlaid(["a", "b"], [chart(cells=((1.0,),)), chart(cells=((2.0,),))]).panels
    assert [panel.title for panel in panels] == ["a: loss", "b: loss"]


def test_the_table_says_which_run_a_row_is_of():
    table = overlaid(["a", "b"], [chart(), chart()]).table
    assert table.columns == ("run", "a")
    assert table.rows == (("a", "1"), ("b", "1"))


def test_charts_of_other_quantities_stay_apart():
    other = Panels("", "", (Panel("accuracy", (), "step"),))
    runs = [Run(name, records()) for name in "ab"]
    assert together([(runs[0], [chart()]), (runs[1], [other])]) == [(runs[0], [chart()]), (runs[1], [other])]


def test_what_is_no_chart_follows_run_by_run():
    runs = [Run(name, records()) for name in "ab"]
    found = together([(run, [Headline(run.name, ""), chart()]) for run in runs])
    assert [(run and run.name, [section.title for section in own]) for run, own in found][1:] == [
        ("a", ["a"]), ("b", ["b"]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def races():
    made = []
    for batch_size in (16, 32):
        options = Options(steps=8, every=4, seeds=2, rates=(0.1,), batch_size=batch_size)
        made.append(to_records(run_race(options, threads=1), threads=1))
    return made


def test_two_races_share_the_chart_of_their_accuracies(races):
    from batchnorm.report.figures import figures_of

    runs = named([Run("race", each) for each in races])
    assert [run.name for run in runs] == ["batch_size 16", "batch_size 32"]
    (_, (accuracy, *_)), *rest = together([(run, list(figures_of(run.records))) for run in runs])
    assert isinstance(accuracy, Plot)
    lines = [trace for trace in accuracy.figure["data"] if trace["meta"]["part"] == "line"]
    alone = next(s for s in figures_of(races[1]) if isinstance(s, Plot)).figure["data"]
    assert len(lines) == 2 * sum(trace["meta"]["part"] == "line" for trace in alone)
    assert {trace["name"].rpartition(", ")[2] for trace in lines} == {"batch_size 16", "batch_size 32"}
    assert [run.name for run, _ in rest] == ["batch_size 16", "batch_size 32"]


def test_links_say_of_which_run_a_section_is(races):
    text = page([Run("race", each) for each in races])
    contents = text[text.index('<nav class="contents"') : text.index("<main")]
    for size in (16, 32):
        assert f"Steps to the same accuracy: batch_size {size}</a>" in contents


def test_names_of_runs_are_escaped_on_the_page():
    hostile = "<img src=x onerror=alert(1)>"
    found = [
        Run("run", RecordFile("watch", {"name": name}, (Measurement("loss", {"step": 1, "layer": ""}, (1.0,)),)))
        for name in (hostile, "b")
    ]
    text = page(found)
    assert hostile not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
