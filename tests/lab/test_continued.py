"""The commands of the lab are runs of its store: killed or stopped they go on, and nothing is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Member
from batchnorm.lab.depth.arms import PLAIN
from batchnorm.lab.heat import Job, crew
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import Store
from batchnorm.records import RecordFile

SOURCE = str(Path(__file__).parents[2] / "src")
RACE = ["race", "--seeds", "1", "--steps", "20", "--depths", "1,2", "--rates", "0.03,0.1", "--threads", "1"]
INCEPTION = ["race", "--network", "inception", "--seeds", "1", "--steps", "6", "--every", "3", "--threads", "1"]
OWN = ["race", "--model", "net.py:make", "--data", "net.py:data", "--seeds", "1", "--steps", "10", "--threads", "1"]
FIGURE = ["figure1", "--seeds", "1", "--steps", "20", "--rates", "0.3,1", "--threads", "1"]
LANDSCAPE = ["landscape", "--seeds", "2", "--steps", "9", "--threads", "1"]
FILM = ["watch-demo", "--steps", "9"]
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "net.py").write_text(NETWORK)
    return tmp_path


def run(words, store="runs"):
    """Run a command in this process; return what it prints, or its one sentence."""
    done = CliRunner().invoke(app, words, env={"BATCHNORM_LAB": store})
    assert done.exception is None or isinstance(done.exception, BatchNormError), done.output
    return str(done.exception or done.output)


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


def assert_same(found, wanted):
    """The same, but for the last digits of numbers: one of the two runs is in the process of the tests.

    What ran in that process before can change the order of sums in libraries, and at 30 times the rate that grows.
    """
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, float) and wanted == wanted:
        assert found == pytest.approx(wanted, rel=1e-3)
    else:
        assert found == wanted or (found != found and wanted != wanted)


def stopped_after_a_part(folder, words, number):
    """Start a command and send it a signal when a part of it is finished; return the file of parts."""
    command = [sys.executable, "-m", "batchnorm", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 400
    while not list(folder.glob("runs/*/checkpoint.safetensors")):
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
    run([*words, "--out", "whole"], store="others")
    parts, _ = stopped_after_a_part(folder, [*words, "--out", "killed"], signal.SIGKILL)
    before = parts.read_text().splitlines()[:1]
    with open(parts, "a") as stream:
        stream.write('{"step": 99, "part": "half a li')
    assert "Going on with runs/" in run([*words, "--out", "killed"])
    assert parts.read_text().splitlines()[:1] == before  # with its seconds: this part was not trained again
    assert_same(measured(folder / "killed" / file), measured(folder / "whole" / file))


@pytest.mark.parametrize("name", ["race", "own"])
def test_lab_resume_goes_on_with_what_was_interrupted(folder, name):
    words, file = COMMANDS[name]
    run([*words, "--out", "whole"], store="others")
    parts, code = stopped_after_a_part(folder, [*words, "--out", "stopped"], signal.SIGINT)
    assert code == 130
    assert words[0] in run(["lab", "list", "--state", "interrupted"])
    before = parts.read_text().splitlines()[:1]
    assert "1 of 1 runs are finished" in run(["lab", "resume", "--threads", "1"])
    assert parts.read_text().splitlines()[:1] == before
    assert "nothing was run again" in run([*words, "--out", "stopped"])
    assert_same(measured(folder / "stopped" / file), measured(folder / "whole" / file))


def test_a_finished_one_is_shown_again_and_others_are_refused(folder):
    first = run(LANDSCAPE)
    record = folder / "batchnorm-landscape" / "landscape.json"
    before = record.read_bytes()
    again = run(LANDSCAPE)
    assert "nothing was run again" in again
    kept = [line for line in first.splitlines() if "page is" not in line and "best accuracy" not in line]
    assert [line for line in kept if line not in again] == []
    assert record.read_bytes() == before
    assert "nothing was run again" in run([*LANDSCAPE, "--out", "elsewhere"])
    assert measured(folder / "elsewhere" / "landscape.json") == measured(record)
    refused = run([*LANDSCAPE, "--batch-size", "16"])
    assert "batchnorm-landscape holds a run with batch_size 128, not 16" in refused
    assert "--force" in refused
    assert record.read_bytes() == before
    run([*LANDSCAPE, "--batch-size", "16", "--force"])
    assert record.read_bytes() != before


def test_the_film_is_a_run_that_is_not_replaced(folder):
    run(FILM)
    record = folder / "batchnorm-watch" / "signal.jsonl"
    before = record.read_bytes()
    assert "nothing was run again" in run(FILM)
    assert "holds a run with rate 0.5, not 0.1" in run([*FILM, "--rate", "0.1"])
    assert record.read_bytes() == before
    run([*FILM, "--rate", "0.1", "--force"])
    assert record.read_bytes() != before
    listed = run(["lab", "list"])
    assert "watch-demo steps=9" in listed
    assert "watch-demo rate=0.1 steps=9" in listed


def test_a_network_that_has_changed_is_another_run(folder):
    run(OWN)
    (folder / "net.py").write_text(NETWORK.replace("ReLU", "Tanh"))
    assert "holds a run with checksum" in run(OWN)
    run([*OWN, "--out", "tanh"])
    assert len(list(folder.glob("runs/*/result.json"))) == 2


def test_every_command_is_listed_and_shown(folder):
    run(LANDSCAPE)
    assert "Along the gradient the loss varies by" in run(["lab", "list"])
    (key,) = (path.name for path in (folder / "runs").iterdir())
    shown = run(["lab", "show", key, "--out", "page.html"])
    assert "layers: 8" in shown
    assert max(map(len, shown.splitlines())) < 600


def test_a_command_is_not_an_experiment_of_lab_run(folder):
    assert "there is no claim 'watch-demo'" in run(["lab", "run", "watch-demo"])
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("configuration", "summary", "words"),
    [
        ({"asked": "x"}, {}, "landscape.json: a value is missing or of another kind than was written"),
        ({}, {"claims": 3}, "holds a run with"),
    ],
)
def test_records_of_another_kind_are_not_gone_on_with(folder, configuration, summary, words):
    file = folder / "batchnorm-landscape" / "landscape.json"
    file.parent.mkdir()
    RecordFile("landscape", configuration, (), summary).write(file)
    before = file.read_bytes()
    assert words in run(LANDSCAPE)
    assert file.read_bytes() == before


@pytest.mark.parametrize("part", ["x", [], {"curves": "x", "seconds": 1.0}, {"curves": [], "seconds": "x"}])
def test_parts_of_another_kind_are_named(tmp_path, part):
    recorder, job = Recorder(Store(tmp_path).add(LabRun("train", {}, "train"))), Job(2, (PLAIN,), (Member(0.1, 0),))
    Parts(recorder).put(f"{job.title}: {job.members[0]}", part)
    with crew(1, parts=Parts(recorder), total=10) as workers:
        heat = workers.start(job, lambda members, look: [], steps=10, largest=1)
        with pytest.raises(BatchNormError, match="a value is missing or of another kind"):
            heat.wait()
