"""``batchnorm lab`` as a user has it: real processes, real kills."""

import json
import os
import signal
import sys
import time

import pytest

SMALL = ["--set", "width=4", "--set", "depth=1"]
LONG = [*SMALL, "--set", "steps=1500", "--set", "every=100", "--set", "momentum=0.9"]


def files(store, name):
    return {path.parent.name: path.read_bytes() for path in sorted(store.glob(f"*/{name}"))}


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_again_and_again_it_ends_with_the_same(lab):
    lab("run", "train", *LONG, "--store", "whole", "--threads", "1")
    killed = lab.folder / "killed"
    for times in range(1, 4):
        process = lab.start("run", "train", *LONG, "--store", "killed", "--threads", "1")
        seen = []

        def moved(seen=seen):
            """Whether two new checkpoints were written."""
            now = [path.stat().st_mtime_ns for path in killed.glob("*/checkpoint.safetensors")]
            seen += [each for each in now if each not in seen]
            return len(seen) > 2

        wait_for(moved, process)
        process.kill()
        process.communicate()
        (folder,) = killed.glob("*/run.json")
        assert len(json.loads((folder.parent / "environment.json").read_text())) == times
        assert not (folder.parent / "result.json").exists()
    out, _ = lab("resume", "--store", "killed")
    assert "1 of 1 runs are finished" in out
    for name in ("metrics.jsonl", "result.json", "run.json"):
        mine, theirs = files(killed, name), files(lab.folder / "whole", name)
        if name == "run.json":
            mine, theirs = ({k: json.loads(v) | {"created": ""} for k, v in each.items()} for each in (mine, theirs))
        assert mine == theirs


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(lab):
    several = ["--set", "seed=0,1,2", *LONG, "--workers", "1"]
    process = lab.start("run", "train", *several)
    store = lab.folder / "batchnorm-lab"
    wait_for(lambda: list(store.glob("*/checkpoint.safetensors")), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, (out, err)
    assert "go on with: batchnorm lab resume" in out
    out, _ = lab("list")
    assert "interrupted" in out
    assert "waiting" in out
    out, _ = lab("resume", "--workers", "2")
    assert "3 of 3 runs are finished" in out or "2 of 2 runs are finished" in out
    out, _ = lab("run", "train", *several)
    assert "3 of 3 runs are finished (3 had been before)" in out


def test_a_worker_that_dies_is_replaced_and_goes_on(lab):
    process = lab.start("run", "train", *LONG)
    store = lab.folder / "batchnorm-lab"
    wait_for(lambda: list(store.glob("*/checkpoint.safetensors")), process)
    (file,) = store.glob("*/environment.json")
    os.kill(json.loads(file.read_text())[0]["process"], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, (out, err)
    assert len(json.loads(file.read_text())) == 2


def test_list_show_compare_and_clean(lab):
    lab("run", "train", *SMALL, "--set", "steps=20", "--set", "rate=0.1,0.2")
    out, _ = lab("list")
    keys = [line.split()[0] for line in out.splitlines()[1:]]
    assert len(keys) == 2
    assert out.count("finished") == 2
    out, _ = lab("show", keys[0][:8])
    assert "rate: 0.1" in out
    assert "start 1:" in out
    out, _ = lab("compare", *keys, "--out", "both.html")
    assert "rate" in out
    page = (lab.folder / "both.html").read_text()
    assert "rate 0.2" in page
    (lab.folder / "batchnorm-lab" / "mine").mkdir()
    _, err = lab("list")
    assert "mine is not a run; it is left alone" in err
    out, _ = lab("clean", "--checkpoints", "--yes")
    assert not list(lab.folder.glob("batchnorm-lab/*/*.safetensors"))
    lab("clean", keys[0], "--yes")
    out, _ = lab("list")
    assert keys[0] not in out
    assert keys[1] in out
    assert (lab.folder / "batchnorm-lab" / "mine").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["list"], "there is no store batchnorm-lab"),
        (["run"], "nothing is named to run"),
        (["run", "algebar"], "did you mean 'algebra'"),
        (["run", "algebra", "--set", "a=1"], "--set is given beside claims"),
        (["run", "algebra", "--budget", "huge"], "--budget is 'huge'"),
        (["run", "algebra", "--all"], "--all is given beside names"),
        (["run", "train", "algebra"], "train is an experiment"),
        (["run", "train", "--on", "mars"], "--on is 'mars'; give local, ray or ray://HOST:PORT"),
        (["run", "train", "--data", "nowhere"], "--data is nowhere, which is not a folder"),
        (["run", "train", "--store", "/proc/nothing"], "/proc"),
        (["clean", "--store", "."], "nothing says what to delete"),
    ],
)
def test_bad_input_is_one_sentence(lab, words, sentence):
    _, err = lab(*words, code=2)
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_two_processes_compute_what_one_does(lab):
    double = [*SMALL, "--set", "dtype=float64", "--set", "steps=60", "--set", "every=20", "--set", "decay=0.001"]
    together = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lab("run", "train", *double, "--store", "one")
    lab("run", "train", *double, "--store", "two", launcher=together)
    lines = [
        [json.loads(line) for line in next((lab.folder / each).glob("*/metrics.jsonl")).read_text().splitlines()]
        for each in ("one", "two")
    ]
    for one, two in zip(*lines, strict=True):
        assert two == pytest.approx(one, rel=1e-9)
    assert len(lines[0]) == 3
    started = json.loads(next((lab.folder / "two").glob("*/environment.json")).read_text())
    assert len(started) == 1  # the first process records, the others write nothing
