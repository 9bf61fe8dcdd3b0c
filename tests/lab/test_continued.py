"""The commands of the lab are runs of its store: killed or stopped they go on, and nothing is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
RACE = ["race", "--seeds", "1", "--steps", "40", "--depths", "2,3", "--rates", "0.03,0.1", "--threads", "1"]
INCEPTION = ["race", "--network", "inception", "--seeds", "1", "--steps", "6", "--every", "3", "--threads", "1"]
OWN = ["race", "--model", "net.py:make", "--data", "net.py:data", "--seeds", "1", "--steps", "20", "--threads", "1"]
FIGURE = ["figure1", "--seeds", "1", "--steps", "60", "--rates", "0.3,1", "--threads", "1"]
LANDSCAPE = ["landscape", "--seeds", "2", "--steps", "30", "--threads", "1"]
FILM = ["watch-demo", "--steps", "60"]
COMMANDS = {
    "race": (RACE, "race.json"),
    "inception": (INCEPTION, "race.json"),
    "own": (OWN, "race.json"),
    "figure1": (FIGURE, "figure1.json"),
    "landscape": (LANDSCAPE, "landscape.json"),
}
NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
def data():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return [(x, (x[:, 0] > 0).long())]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHNORM_LAB", "runs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "net.py").write_text(NETWORK)
    return tmp_path


def start(folder, words, **environment):
    command = [sys.executable, "-m", "batchnorm", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, **pipes)


def run(folder, words, code=0, **environment):
    process = start(folder, words, **environment)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()  # a process that took too long would go on after the test
    assert process.returncode == code, (out, err)
    return out, err


def measured(path):
    """What was measured, without the times."""
    records = json.loads(path.read_text())
    timed = [m for m in records["measurements"] if "seconds" in m["quantity"]]
    summary = {
        key: value
        for key, value in records["summary"].items()
        if key not in ("notes", "lines") and "seconds" not in key and "peak" not in key
    }
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in summary.pop("rows", ())]
    return [m for m in records["measurements"] if m not in timed], summary, rows, records["configuration"]


def stopped_after_a_part(folder, words, number):
    """Start a command and send it a signal when a part of it is finished; return the file of parts."""
    process = start(folder, words)
    deadline = time.monotonic() + 400
    while not any(b"\n" in file.read_bytes() for file in folder.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate()
    (parts,) = folder.glob("runs/*/metrics.jsonl")
    return parts, process.returncode


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_in_the_middle_it_goes_on(folder, name):
    words, file = COMMANDS[name]
    run(folder, [*words, "--out", "whole"], BATCHNORM_LAB="others")
    parts, _ = stopped_after_a_part(folder, [*words, "--out", "killed"], signal.SIGKILL)
    before = parts.read_text().splitlines()[:1]
    with open(parts, "a") as stream:
        stream.write('{"step": 99, "part": "half a li')
    _, err = run(folder, [*words, "--out", "killed"])
    assert "Going on with runs/" in err
    assert parts.read_text().splitlines()[:1] == before  # with its seconds: this part was not trained again
    assert measured(folder / "killed" / file) == measured(folder / "whole" / file)


@pytest.mark.parametrize("name", ["race", "own", "landscape"])
def test_lab_resume_goes_on_with_what_was_interrupted(folder, name):
    words, file = COMMANDS[name]
    run(folder, [*words, "--out", "whole"], BATCHNORM_LAB="others")
    parts, code = stopped_after_a_part(folder, [*words, "--out", "stopped"], signal.SIGINT)
    assert code == 130
    listed = run(folder, ["lab", "list", "--state", "interrupted"])[0]
    assert words[0] in listed
    before = parts.read_text().splitlines()[:1]
    out, _ = run(folder, ["lab", "resume", "--threads", "1"])
    assert "1 of 1 runs are finished" in out
    assert parts.read_text().splitlines()[:1] == before
    assert "nothing was run again" in run(folder, [*words, "--out", "stopped"])[0]
    assert measured(folder / "stopped" / file) == measured(folder / "whole" / file)


@pytest.mark.parametrize(("words", "file"), [(RACE, "race.json"), (OWN, "race.json"), (LANDSCAPE, "landscape.json")])
def test_a_finished_one_is_shown_again_and_others_are_refused(folder, words, file):
    first, _ = run(folder, words)
    (record,) = folder.glob(f"batchnorm-*/{file}")
    before = record.read_bytes()
    again, _ = run(folder, words)
    assert "nothing was run again" in again
    kept = [line for line in first.splitlines() if "page is" not in line]
    assert [line for line in kept if line not in again] == []
    assert record.read_bytes() == before
    elsewhere, _ = run(folder, [*words, "--out", "elsewhere"])
    assert "nothing was run again" in elsewhere
    assert measured(folder / "elsewhere" / file) == measured(record)
    _, err = run(folder, [*words, "--batch-size", "16"], code=2)
    assert "holds a run with batch_size" in err
    assert "--force" in err
    assert record.read_bytes() == before
    run(folder, [*words, "--batch-size", "16", "--force"])
    assert record.read_bytes() != before


def test_the_film_is_a_run_that_is_not_replaced(folder):
    run(folder, FILM)
    record = folder / "batchnorm-watch" / "signal.jsonl"
    before = record.read_bytes()
    assert "nothing was run again" in run(folder, FILM)[0]
    assert "holds a run with rate 0.5, not 0.1" in run(folder, [*FILM, "--rate", "0.1"], code=2)[1]
    assert record.read_bytes() == before
    run(folder, [*FILM, "--rate", "0.1", "--force"])
    assert record.read_bytes() != before
    listed = run(folder, ["lab", "list"])[0]
    assert "watch-demo steps=60" in listed
    assert "watch-demo rate=0.1 steps=60" in listed


def test_a_network_that_has_changed_is_another_run(folder):
    run(folder, OWN)
    (folder / "net.py").write_text(NETWORK.replace("ReLU", "Tanh"))
    assert "holds a run with checksum" in run(folder, OWN, code=2)[1]
    run(folder, [*OWN, "--out", "tanh"])
    assert len(list(folder.glob("runs/*/result.json"))) == 2


def test_every_command_is_listed_and_shown(folder):
    run(folder, LANDSCAPE)
    listed = run(folder, ["lab", "list"])[0]
    assert "Along the gradient the loss varies by" in listed
    (key,) = (path.name for path in (folder / "runs").iterdir())
    shown = run(folder, ["lab", "show", key, "--out", "page.html"])[0]
    assert "layers: 8" in shown
    assert max(map(len, shown.splitlines())) < 600
