"""race, figure1 and landscape into a folder that has one already: they go on or refuse, and never replace."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import batchnorm as bn
from batchnorm.lab.curves import Member
from batchnorm.lab.front import earlier
from batchnorm.lab.heat import crew
from batchnorm.lab.shelf import FILE, Shelf
from batchnorm.records import RecordFile

SOURCE = str(Path(__file__).parents[2] / "src")
RACE = ["race", "--seeds", "1", "--steps", "40", "--depths", "2,3", "--rates", "0.03,0.1", "--threads", "1"]
FIGURE = ["figure1", "--seeds", "1", "--steps", "60", "--rates", "0.3,1", "--threads", "1"]
INCEPTION = ["race", "--network", "inception", "--seeds", "1", "--steps", "6", "--every", "3", "--threads", "1"]
LANDSCAPE = ["landscape", "--seeds", "1", "--steps", "6"]


def start(folder, words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "batchnorm", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder, words, code=0):
    process = start(folder, words)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, (out, err)
    return out, err


def measured(path):
    """What was measured, without the times."""
    records = json.loads(path.read_text())
    timed = [m for m in records["measurements"] if "seconds" in m["quantity"]]
    summary = {
        key: value
        for key, value in records["summary"].items()
        if key != "notes" and "seconds" not in key and "peak" not in key
    }
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in summary.pop("rows", ())]
    return [m for m in records["measurements"] if m not in timed], summary, rows, records["configuration"]


@pytest.mark.parametrize(("words", "name"), [(RACE, "race"), (FIGURE, "figure1"), (INCEPTION, "race")])
def test_killed_in_the_middle_it_goes_on(tmp_path, words, name):
    run(tmp_path, [*words, "--out", "whole"])
    process = start(tmp_path, [*words, "--out", "killed"])
    parts = tmp_path / "killed" / FILE
    deadline = time.monotonic() + 120
    while not parts.exists() or parts.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    with open(parts, "a") as stream:
        stream.write('{"key": "half a li')
    _, err = run(tmp_path, [*words, "--out", "killed"])
    assert "parts are done" in err
    assert measured(tmp_path / "killed" / f"{name}.json") == measured(tmp_path / "whole" / f"{name}.json")
    assert not parts.exists()


@pytest.mark.parametrize(("words", "name"), [(RACE, "race"), (LANDSCAPE, "landscape")])
def test_a_finished_one_is_shown_again_and_others_are_refused(tmp_path, words, name):
    first, _ = run(tmp_path, words)
    (record,) = tmp_path.glob(f"*/{name}.json")
    before = record.read_bytes()
    again, _ = run(tmp_path, words)
    assert "nothing was run again" in again
    kept = [line for line in first.splitlines() if "page is" not in line]
    assert [line for line in kept if line not in again] == []
    assert record.read_bytes() == before
    _, err = run(tmp_path, [*words, "--batch-size", "16"], code=2)
    assert "holds a run with batch_size" in err
    assert "--force" in err
    assert record.read_bytes() == before
    run(tmp_path, [*words, "--batch-size", "16", "--force"])
    assert record.read_bytes() != before


def test_a_shelf_of_other_settings_is_refused(tmp_path):
    Shelf(tmp_path / FILE, {"steps": 800, "rates": (0.1, 0.2)}).put("a", {"value": float("nan")})
    assert Shelf(tmp_path / FILE, {"rates": [0.1, 0.2], "steps": 800}).get("a") == {"value": None}
    with pytest.raises(bn.BatchNormError, match="holds a run with steps 800, not 900"):
        Shelf(tmp_path / FILE, {"steps": 900, "rates": (0.1, 0.2)})
    (tmp_path / FILE).write_text("nonsense\n")
    with pytest.raises(bn.BatchNormError, match=r"parts\.jsonl is damaged"):
        Shelf(tmp_path / FILE, {})


@pytest.mark.parametrize(
    ("configuration", "summary", "words"),
    [
        ({"settings": "x"}, {}, "figure1.json: a value is missing or of another kind than was written"),
        ({"settings": {"steps": 1}, "checksum": "0f"}, {"claims": 3}, "these records of 'figure1' cannot be drawn"),
    ],
)
def test_records_of_another_kind_are_not_gone_on_with(tmp_path, configuration, summary, words):
    RecordFile("figure1", configuration, (), summary).write(tmp_path / "figure1.json")
    before = (tmp_path / "figure1.json").read_bytes()
    with pytest.raises(bn.BatchNormError, match=words):
        earlier(tmp_path, "figure1", {"command": "figure1", "steps": 1, "data": "0f"}, force=False)
    assert (tmp_path / "figure1.json").read_bytes() == before


@pytest.mark.parametrize("part", ["x", [], {"curves": "x", "seconds": 1.0}, {"curves": [], "seconds": "x"}])
def test_parts_of_another_kind_are_named(tmp_path, part):
    member, shelf = Member(0.1, 0), Shelf(tmp_path / FILE, {})
    shelf.put(f"one: {member}", part)
    with crew(1, Shelf(tmp_path / FILE, {})) as workers:
        heat = workers.start([member], lambda members, look: [], None, largest=1, name="one", steps=10)
        with pytest.raises(bn.BatchNormError, match=r"parts\.jsonl: a value is missing or of another kind"):
            heat.wait()
