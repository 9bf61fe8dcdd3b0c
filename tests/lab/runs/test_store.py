"""The store: keys, what is read back, what is refused, what a kill leaves."""

import json
import math
import multiprocessing

import pytest
import torch

import batchnorm as bn
from batchnorm.lab.runs.compare import compare, to_records
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.experiments import runs_of
from batchnorm.lab.runs.figures import FIGURES
from batchnorm.lab.runs.recorder import Recorder, Stopped
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import CHECKPOINT, Busy, Store

SMALL = ["width=4", "depth=1", "steps=30", "every=10"]


def added(tmp_path, **options):
    return Store(tmp_path / "runs").add(LabRun("train", options, "a run"))


def test_a_key_depends_on_the_options_alone():
    assert LabRun("train", {"a": 1, "b": 2}, "x").key == LabRun("train", {"b": 2, "a": 1}, "y").key
    others = [
        LabRun("train", {"a": 1}),
        LabRun("train", {"a": 2}),
        LabRun("train", {"a": "1"}),
        LabRun("claim", {"a": 1}),
    ]
    assert len({run.key for run in others}) == 4


def test_a_run_is_added_once(tmp_path):
    first = added(tmp_path, seed=0)
    before = (first.path / "run.json").read_bytes()
    assert Store(tmp_path / "runs").add(LabRun("train", {"seed": 0}, "another name")).run.name == "a run"
    assert (first.path / "run.json").read_bytes() == before
    assert first.state == "waiting"


def test_lines_and_checkpoints_come_back(tmp_path):
    folder = added(tmp_path)
    recorder = Recorder(folder)
    shared = torch.arange(4.0)
    recorder.log(1, loss=0.1 + 0.2, accuracy=float("nan"))
    recorder.save(1, {"a": shared, "b": shared[::2]}, best=0.5, names=["x"])
    recorder.log(2, loss=7.0)
    again = Recorder(folder).restored()
    assert again.step == 1
    assert again.facts == {"best": 0.5, "names": ["x"]}
    assert again.tensors["b"].tolist() == [0.0, 2.0]
    lines = folder.metrics()
    assert [line["step"] for line in lines] == [1]  # what came after the checkpoint is made again
    assert lines[0]["loss"] == 0.1 + 0.2
    assert math.isnan(lines[0]["accuracy"])


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    folder = added(tmp_path)
    Recorder(folder).log(1, loss=1.0)
    with open(folder.path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 2, "lo')
    assert [line["step"] for line in folder.metrics()] == [1]


def test_a_stop_waits_for_the_checkpoint(tmp_path):
    recorder = Recorder(added(tmp_path), stop=lambda: True)
    recorder.progress(1, 10)
    assert recorder.due()
    with pytest.raises(Stopped):
        recorder.save(1, {})
    assert recorder.folder.progress() == {"done": 1, "total": 10, "note": ""}


def test_a_stop_does_not_wait_for_ever(tmp_path):
    recorder = Recorder(added(tmp_path), stop=lambda: True)
    recorder.progress(1, 10)
    with pytest.raises(Stopped):
        recorder.progress(2, 10)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("result.json", "{", "result.json is damaged"),
        ("result.json", "[]", "it holds no result"),
        ("metrics.jsonl", "nonsense\n", "line 1 cannot be read"),
        ("metrics.jsonl", '{"loss": 1}\n', "line 1 cannot be read"),
        ("metrics.jsonl", '{"step": "1"}\n', "step is a str"),
        ("environment.json", "{}", "it holds no list of starts"),
        ("result.json", "[" * 5000, "nested too deeply"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, words):
    folder = added(tmp_path)
    (folder.path / file).write_text(content)
    read = {"result.json": folder.result, "metrics.jsonl": folder.metrics, "environment.json": folder.attempts}[file]
    with pytest.raises(bn.BatchNormError, match=words) as error:
        read()
    assert str(folder.path / file) in str(error.value)
    assert "move the run elsewhere" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100, None])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    folder = added(tmp_path)
    if content is None:  # a checkpoint of another program
        from safetensors.torch import save_file

        save_file({"w": torch.ones(1)}, folder.path / CHECKPOINT)
    else:
        (folder.path / CHECKPOINT).write_bytes(content)
    with pytest.raises(bn.BatchNormError, match=r"checkpoint\.safetensors is damaged"):
        Recorder(folder)


def test_metrics_that_were_shortened_are_refused(tmp_path):
    folder = added(tmp_path)
    recorder = Recorder(folder)
    recorder.log(1, loss=1.0)
    recorder.save(1, {})
    (folder.path / "metrics.jsonl").write_text("")
    with pytest.raises(bn.BatchNormError, match="it has 0 bytes, its checkpoint was made at"):
        Recorder(folder)


def test_what_is_no_run_is_named_and_left_alone(tmp_path):
    folder = added(tmp_path, seed=0)
    root = folder.path.parent
    (root / "notes").mkdir()
    (root / "page.html").write_text("a page of ours")
    forged = root / "0123456789ab"
    forged.mkdir()
    (forged / "run.json").write_text((folder.path / "run.json").read_text())
    broken = root / "ba9876543210"
    broken.mkdir()
    (broken / "run.json").write_text("{}")
    (root / "abcdefabcdef").mkdir()  # a kill came before anything was written
    runs, foreign = Store(root).runs()
    assert [each.path for each in runs] == [folder.path]
    assert len(foreign) == 3
    assert f"{root / 'notes'} is not a run" in " ".join(foreign)
    assert "not those that the folder is named after" in " ".join(foreign)
    assert sorted(each.name for each in root.iterdir()) == sorted(
        [folder.path.name, "notes", "page.html", forged.name, broken.name, "abcdefabcdef"]
    )


def test_a_folder_with_other_things_is_not_written_to(tmp_path):
    run = LabRun("train", {"seed": 0})
    folder = tmp_path / "runs" / run.key
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(bn.BatchNormError, match=r"it is missing beside thesis\.txt"):
        Store(tmp_path / "runs").add(run)
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_leftovers_of_a_kill_are_removed(tmp_path):
    folder = added(tmp_path)
    left = folder.path / ".result.json.0123456789abcdef"
    left.mkdir()
    (left / "result.json").write_text("half")
    kept = folder.path / ".mine"
    kept.mkdir()
    folder.remove_leftovers()
    assert not left.exists()
    assert kept.exists()


def hold(path, held, done):
    store = Store(path.parent)
    with store.read(path).opened():
        held.set()
        done.wait(60)


def test_one_process_at_a_time(tmp_path):
    folder = added(tmp_path)
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(folder.path, held, done))
    other.start()
    try:
        assert held.wait(60)
        assert folder.state == "running"
        with pytest.raises(Busy, match="another process is at this run"):
            execute(folder)
        other.kill()  # the system lets go of the lock
        other.join(60)
        assert folder.state == "waiting"
    finally:
        other.kill()


def test_a_failure_is_kept_and_tried_again(tmp_path):
    store = Store(tmp_path / "runs")
    folder = store.add(LabRun("train", {"data": "digits"}, "options are missing"))
    with pytest.raises(KeyError):
        execute(folder)
    assert folder.state == "failed"
    assert "KeyError" in folder.read("failure.json")["error"]
    with pytest.raises(KeyError):
        execute(folder)
    assert len(folder.attempts()) == 2


def test_a_finished_run_is_not_run_again(tmp_path):
    store = Store(tmp_path / "runs")
    folder = store.add(runs_of("train", SMALL)[0])
    assert execute(folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert execute(folder)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    about = folder.attempts()[0]
    assert about["torch"] == torch.__version__
    assert about["threads"] == 1
    assert about["kernel"]


def test_runs_are_compared_by_what_differs(tmp_path):
    store = Store(tmp_path / "runs")
    folders = [store.add(run) for run in runs_of("train", [*SMALL, "norm=batch,none"])]
    execute(folders[0])
    comparison = compare(folders)
    assert comparison.names == ("norm batch", "norm none")
    assert comparison.options == {"norm": ["batch", "none"]}
    assert list(comparison.curves["accuracy"][0]) == [10, 20, 30]
    assert comparison.results["accuracy"][1] is None
    records = to_records(comparison)
    panels, table = (draw(records) for draw in FIGURES)
    assert [panel.title for panel in panels.panels] == ["loss", "accuracy", "rate"]
    assert ("norm", "batch", "none") in table.rows
    with pytest.raises(bn.BatchNormError, match="a run is named twice"):
        compare([folders[0], folders[0]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["rate"], "--set rate has no value"),
        (["raet=1"], "did you mean 'rate'"),
        (["rate=fast"], "rate is 'fast'; give a number"),
        (["steps=1.5"], "steps is '1.5'; give a whole number"),
        (["steps=0"], "steps is 0; give a whole number from 1 up"),
        (["rate=nan"], "rate is nan; give a number above 0"),
        (["norm=batchnorm"], "norm is 'batchnorm'; choose one of"),
        (["norm=group"], "the network 'residual' has no norm 'group'"),
        (["rate=1", "rate=2"], "rate is set twice"),
        (["data=minst"], "data is 'minst'; choose one of"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(given, words):
    with pytest.raises(bn.BatchNormError, match=words):
        runs_of("train", given)


def test_runs_are_found_by_the_beginning_of_their_key(tmp_path):
    store = Store(tmp_path / "runs")
    folders = [store.add(LabRun("train", {"seed": seed}, f"seed {seed}")) for seed in range(40)]
    assert store.find(folders[3].path.name[:10]) == folders[3]
    assert store.find("seed 7") == folders[7]
    first = sorted(folder.path.name[0] for folder in folders)
    twice = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(bn.BatchNormError, match="give more of the key"):
        store.find(twice)
    assert json.loads((folders[0].path / "run.json").read_text())["name"] == "seed 0"
