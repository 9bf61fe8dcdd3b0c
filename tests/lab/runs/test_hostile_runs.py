"""Untrusted or damaged runs: named in one sentence, left alone, and no other run is affected."""

import dataclasses
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import batchnorm as bn
from batchnorm.commands import app
from batchnorm.lab.claims import claim_named
from batchnorm.lab.judge.claim import judged
from batchnorm.lab.judge.measure import state_of
from batchnorm.lab.judge.records import drawable, to_records
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.experiments import runs_of
from batchnorm.lab.runs.recorder import read_checkpoint
from batchnorm.lab.runs.store import CHECKPOINT, FILES, Store
from batchnorm.report.sections import Headline
from batchnorm.terminal import ended

SMALL = ["width=4", "depth=1", "steps=20", "every=10"]
NASTY = "\x1b[31mred\n::error::x\u202e"


def run(*arguments):
    return ended(lambda: app([str(argument) for argument in arguments], standalone_mode=False))


def shown(text):
    """Whether every line is one that a terminal and a log show."""
    return all(line.isprintable() and not line.startswith("::") for line in text.split("\n"))


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two finished runs, made by hand: the folder of the first one."""
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    for each in runs_of("train", ["steps=20,30"]):
        folder = store.add(each)
        folder.write("result.json", {"accuracy": 0.5, "headline": "accuracy 50.0%"})
        folder.write("environment.json", [{"threads": 1, "seconds": 2.0}])
        (folder.path / "metrics.jsonl").write_text('{"step": 10, "loss": 0.5}\n')
    return store.runs()[0][0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("result.json", "nonsense"),
        ("result.json", "[]"),
        ("failure.json", '["x"]'),
        ("failure.json", '"x"'),
        ("failure.json", "{}"),
    ],
)
def test_one_damaged_run_does_not_hide_the_others(capsys, two, file, content):
    if file == "failure.json":
        (two.path / "result.json").unlink()
    (two.path / file).write_text(content)
    assert run("lab", "list", "--store", "runs") == 0
    out, err = capsys.readouterr()
    assert out.count("accuracy 50.0%") == 1
    assert f"{two.path.name}  damaged" in out
    assert f"{file} is damaged" in err
    assert len(err.splitlines()) == 1
    assert run("lab", "show", two.path.name, "--store", "runs") == 2
    assert f"{file} is damaged" in capsys.readouterr().err
    assert (two.path / file).read_text() == content


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "loss": %s}' % ("9" * 400), '{"step": 1, "loss": %s}' % ("[" * 60 + "]" * 60), "\0\0\0\0\0", "[]"],
)
def test_metrics_that_were_never_measured(capsys, two, line):
    (two.path / "metrics.jsonl").write_text(line + "\n")
    other = next(each for each in Store("runs").runs()[0] if each != two)
    assert run("lab", "compare", two.path.name, other.path.name, "--store", "runs") == 2
    err = capsys.readouterr().err
    assert "metrics.jsonl is damaged (line 1 cannot be read" in err
    assert len(err.splitlines()) == 1


def linked(place):
    place.symlink_to(place.parent.parent.parent / "thesis.txt")


def nowhere(place):
    place.symlink_to("nowhere")


def folder(place):
    place.mkdir()


@pytest.mark.parametrize("make", [linked, nowhere, folder, os.mkfifo])
@pytest.mark.parametrize("file", FILES)
def test_a_run_has_files_of_its_own(capsys, two, file, make):
    """Through a link a run would write to, or cut off, a file of the user; a pipe would wait for ever."""
    Path("thesis.txt").write_text("mine")
    if (two.path / file).exists():
        (two.path / file).unlink()
    make(two.path / file)
    with pytest.raises(bn.BatchNormError, match=rf"{file} is damaged \(it is (a symbolic link|not a regular file)\)"):
        Store("runs").add(two.run)
    assert run("lab", "list", "--store", "runs") == 0
    out, err = capsys.readouterr()
    assert out.count("accuracy 50.0%") == 1
    assert len(err.splitlines()) == 1
    assert run("lab", "clean", two.path.name, "--yes", "--store", "runs") == 2
    assert f"{file} is damaged" in capsys.readouterr().err
    assert Path("thesis.txt").read_text() == "mine"
    assert os.path.lexists(two.path / file)


def test_a_folder_that_is_a_link_is_no_run(two):
    outside = two.path.rename("outside")
    two.path.symlink_to(outside.absolute())
    for use in (lambda: Store("runs").add(two.run), lambda: Store("runs").read(two.path)):
        with pytest.raises(bn.BatchNormError, match="is a symbolic link, not the folder of a run"):
            use()


@pytest.mark.parametrize("name", [NASTY, "0f3\udc80", "[red]", "a" * 5000])
def test_names_of_runs_are_shown_and_not_obeyed(capsys, two, name):
    about = json.loads((two.path / "run.json").read_text()) | {"name": name, "created": name}
    (two.path / "run.json").write_text(json.dumps(about))
    two.write("result.json", {"headline": name, name: name})
    two.write("environment.json", [{name: name}])
    (two.path / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 0.5}) + "\n")
    other = next(each for each in Store("runs").runs()[0] if each.path != two.path)
    for words in (
        ["list"],
        ["show", two.path.name],
        ["compare", two.path.name, other.path.name],
        ["clean", two.path.name],
    ):
        run("lab", *words, "--store", "runs")
        out, err = capsys.readouterr()
        assert shown(out.replace("[y/N]: ", "")), out
        assert shown(err), err


def test_the_name_of_a_run_does_not_stand_for_the_key_of_another(two):
    other = next(each for each in Store("runs").runs()[0] if each != two)
    for name in (other.path.name, other.path.name[:5]):
        about = json.loads((two.path / "run.json").read_text()) | {"name": name}
        (two.path / "run.json").write_text(json.dumps(about))
        assert Store("runs").find(name).path == other.path


# ---- what is deleted


def test_clean_deletes_the_run_and_nothing_else(capsys, two):
    (two.path / "notes.txt").write_text("mine")
    (two.path / "more").mkdir()
    assert run("lab", "clean", two.path.name, "--yes", "--store", "runs") == 0
    assert "is kept: more, notes.txt are not of the run" in capsys.readouterr().out
    assert sorted(each.name for each in two.path.iterdir()) == ["more", "notes.txt"]


def test_clean_deletes_the_checkpoint_and_no_other_tensors(two):
    for name in (CHECKPOINT, "best.safetensors"):
        (two.path / name).write_bytes(b"x")
    assert run("lab", "clean", "--checkpoints", "--yes", "--store", "runs") == 0
    assert not (two.path / CHECKPOINT).exists()
    assert (two.path / "best.safetensors").exists()
    assert two.finished


def test_a_deletion_that_is_killed_leaves_a_run(two, monkeypatch):
    real, deleted = Path.unlink, []

    def unlink(path, **how):
        if len(deleted) == 3:
            raise KeyboardInterrupt
        deleted.append(path.name)
        real(path, **how)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        two.delete()
    assert not two.finished
    assert two.path in [each.path for each in Store("runs").runs()[0]]


def test_clean_looks_again_after_the_question(capsys, two, monkeypatch):
    held, done = threading.Event(), threading.Event()

    def hold():
        with two.opened():
            held.set()
            done.wait(60)

    (two.path / "result.json").unlink()
    other = threading.Thread(target=hold)

    def confirm(question):
        other.start()
        assert held.wait(60)
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    try:
        assert run("lab", "clean", two.path.name, "--store", "runs") == 2
    finally:
        done.set()
        other.join(60)
    assert "is under way" in capsys.readouterr().err
    assert (two.path / "run.json").exists()


# ---- what is gone on with


def finished(tmp_path):
    folder = Store(tmp_path / "runs").add(runs_of("train", SMALL)[0])
    execute(folder)
    return folder


def test_a_kill_between_the_last_checkpoint_and_the_result(tmp_path):
    folder = finished(tmp_path)
    before = (folder.path / "result.json").read_bytes()
    (folder.path / "result.json").unlink()
    assert execute(folder)
    assert (folder.path / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    "about",
    [
        '{"step": 1e999, "kept": 0, "facts": {}}',
        '{"step": 1, "kept": 1e999, "facts": {}}',
        '{"step": 1, "kept": -5, "facts": {}}',
        '{"step": -1, "kept": 0, "facts": {}}',
        '{"step": 1, "kept": 0, "facts": []}',
        '{"step": 1, "kept": 0, "facts": {"a": %s}}' % ("9" * 400),
        "[" * 100_000,
        "9" * 5000,
        "null",
    ],
)
def test_checkpoints_that_say_what_cannot_be(tmp_path, about):
    save_file({"w": torch.ones(1)}, tmp_path / CHECKPOINT, {"batchnorm": about})
    with pytest.raises(bn.BatchNormError, match="it is not a checkpoint of a run"):
        read_checkpoint(tmp_path / CHECKPOINT)


def test_checkpoints_of_another_network(tmp_path):
    folder = finished(tmp_path)
    (folder.path / "result.json").unlink()
    right, kept = read_checkpoint(folder.path / CHECKPOINT)
    name = next(iter(right.tensors))
    wrong = (
        ({"w": torch.ones(1)}, 10, {}, "are missing"),
        ({**right.tensors, f"network.{NASTY}": torch.ones(1)}, 10, {}, "is unexpected"),
        ({**right.tensors, name: torch.ones(7)}, 10, {}, "has another shape"),
        ({**right.tensors, f"momentum.{NASTY}": torch.ones(1)}, 10, {}, "is unexpected"),
        (right.tensors, 10**9, {}, r"of step 1,000,000,000"),
        (right.tensors, 10, {"best": "x"}, "best is a str, not a float"),
        (right.tensors, 10, {"more": 1}, "'more', which is unknown"),
    )
    for tensors, step, facts, words in wrong:
        about = {"step": step, "kept": kept, "facts": {**right.facts, **facts}}
        save_file(tensors, folder.path / CHECKPOINT, {"batchnorm": json.dumps(about)})
        with pytest.raises(bn.BatchNormError, match=words) as error:
            execute(folder)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("threads", ["x", -1, 0, True, None, 1e300, 10**9])
def test_threads_that_no_machine_has(tmp_path, threads):
    folder = Store(tmp_path / "runs").add(runs_of("train", SMALL)[0])
    folder.write("environment.json", [{"threads": threads}])
    with pytest.raises(bn.BatchNormError, match=r"environment\.json is damaged \(it holds no list of starts\)"):
        execute(folder)


# ---- claims


@pytest.mark.parametrize("result", [{}, {"errors": "x"}, {"errors": {NASTY: [None]}}, {"identities": [[]]}])
def test_results_that_a_claim_would_not_have_written(capsys, tmp_path, monkeypatch, result):
    monkeypatch.chdir(tmp_path)
    claim, store = claim_named("algebra"), Store("runs")
    for each in claim.runs("quick"):
        store.add(each).write("result.json", result)
    state = drawable(state_of(claim, store))
    assert (state.budget, state.judgement.outcome) == ("", "not judged")
    assert to_records([state]).summary["claims"][0]["sections"] == []
    assert run("claims", "algebra", "--store", "runs") == 0
    out, err = capsys.readouterr()
    assert "verdict: not judged. the results of algebra in the store" in out
    assert shown(out)
    assert run("claims", "--store", "runs") == 0
    out, err = capsys.readouterr()
    assert "the results of algebra in the store" in err
    assert len(err.splitlines()) == 1
    assert run("lab", "report", "--store", "runs") == 0
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert (tmp_path / "runs" / "claims.html").exists()


@pytest.mark.parametrize("draw", [lambda parts: parts[7], lambda parts: [Headline("8 times", 3)]])
def test_results_that_can_be_judged_and_not_drawn(tmp_path, draw):
    claim = dataclasses.replace(claim_named("algebra"), judge=lambda parts: judged("It holds.", []), draw=draw)
    for each in claim.runs("quick"):
        Store(tmp_path).add(each).write("result.json", {})
    state = state_of(claim, Store(tmp_path))
    assert state.budget == "quick"
    assert drawable(state).problem.startswith("the results of algebra in the store: a value is missing")


def test_the_store_of_another_user_can_be_read(capsys, two, monkeypatch):
    (two.path / "result.json").unlink()
    with two.opened():
        pass

    def refuse(lock):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert run("lab", "list", "--store", "runs") == 0
    assert "interrupted" in capsys.readouterr().out
    with pytest.raises(bn.BatchNormError, match=r"cannot be written to \(Permission denied\)"), two.opened():
        pass


def test_a_look_at_a_run_makes_no_file(two):
    (two.path / "result.json").unlink()
    before = sorted(os.listdir(two.path))
    assert two.state == "interrupted"
    assert sorted(os.listdir(two.path)) == before
