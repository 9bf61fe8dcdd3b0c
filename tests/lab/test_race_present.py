import json
from pathlib import Path

import pytest
from race_examples import baseline, curve, lane, race, whole_race

from batchnorm.errors import BatchNormError
from batchnorm.lab.present import ASCII_BARS, as_text, notes, sparkline
from batchnorm.lab.records import from_records, to_records
from batchnorm.lab.summary import Lane, summarise
from batchnorm.records import RecordFile

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name, text):
    """Compare with the stored picture; to draw it anew, delete the file, run again and read it."""
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was missing and has been written: look at it")
    assert text == path.read_text(encoding="utf-8")


def test_a_whole_race():
    check_golden("race.txt", as_text(summarise(whole_race())))


def test_an_interrupted_race_in_ascii_only():
    text = as_text(summarise(race(*whole_race().lanes[:1], interrupted=True)), unicode=False)
    check_golden("race-interrupted.txt", text)


def test_a_baseline_that_did_not_train():
    flat = Lane("Inception", tuple(curve(r, s, *[0.1] * 4) for r in (0.1, 0.2, 0.4) for s in range(3)), 0.2, 2.0)
    bn = lane("BN-Baseline", 0.2, *[(0.3, 0.6, 0.8, 0.9)] * 3)
    check_golden("race-untrained.txt", as_text(summarise(race(flat, bn))))


@pytest.mark.parametrize("name", ["race.txt", "race-interrupted.txt", "race-untrained.txt"])
def test_pictures_fit_a_terminal_and_hold_no_control_characters(name):
    lines = (GOLDEN / name).read_text(encoding="utf-8").split("\n")
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)


def test_a_best_rate_at_the_edge_of_the_grid_is_told():
    lanes = [Lane("Inception", baseline().curves, rate, 1.0) for rate in (0.1, 0.2, 0.4)]
    low, middle, high = (" ".join(notes(summarise(race(each)))) for each in lanes)
    assert "is the lowest of the grid" in low
    assert "of the grid" not in middle
    assert "is the highest of the grid" in high
    assert "Inception: 3 of 3 seeds diverged (rate 0.4)" in high


def test_a_sparkline_averages_what_does_not_fit():
    assert sparkline((0.0, 1.0, 1.0, 1.0), width=2, bars=ASCII_BARS) == "=@"
    assert sparkline((), bars=ASCII_BARS) == ""


def test_records_bring_the_same_table_back():
    result = whole_race()
    text = to_records(result, threads=2).to_json()
    again = from_records(RecordFile.from_json(text))
    assert as_text(summarise(again)) == as_text(summarise(result))
    assert again.options == result.options


def test_records_hold_every_curve_and_the_figures():
    stored = json.loads(to_records(whole_race(), threads=2).to_json())
    curves = [m for m in stored["measurements"] if m["quantity"] == "validation accuracy"]
    assert len(curves) == 9 + 5 * 3
    assert curves[-1]["setting"] == {
        "variant": "Sigmoid",
        "learning_rate": 1.0,
        "seed": 2,
        "momentum": 0.0,
        "schedule": "constant",
        "clip": None,
        "diverged_at": None,
    }
    assert curves[6]["samples"] == [0.5, 0.77, None, None]
    assert stored["configuration"]["evaluated_at"] == [10, 20, 30, 40]
    assert stored["summary"]["target"] == 0.80
    assert stored["summary"]["rows"][1]["to_best"]["ratio"] == 2.0


def test_records_of_another_command_are_refused():
    with pytest.raises(BatchNormError, match="records of 'bench', not of a race"):
        from_records(RecordFile("bench", {}, ()))
