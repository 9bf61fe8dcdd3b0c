"""Files that grow by whole lines, survive a kill, and are shared; TensorBoard."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from watching import batches, of, sgd, stack, train

import batchnorm as bn
from batchnorm.observe.sinks import JsonLines, Memory, TensorBoard, sinks_of
from batchnorm.records import Measurement, RecordFile, header_line, line, read


def run(to, steps=4, every=2, lr=0.1, **options):
    torch.manual_seed(0)
    model = stack()
    with bn.watch(model, every=every, to=to, **options) as seen:
        train(model, sgd(model, lr), batches(steps), lambda loss: seen.log("training loss", loss))
    return seen


def test_the_file_holds_what_memory_would(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    file, memory = run(path), run(None)
    records = read(path)
    assert records.measurements == memory.records.measurements == file.records.measurements
    assert records.command == "watch"
    assert records.configuration["every"] == 2
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert set(lines[0]) == {"format", "command", "configuration", "machine", "summary"}
    assert all(set(each) == {"quantity", "setting", "samples", "unit"} for each in lines[1:])


def test_every_recorded_step_is_in_the_file_when_it_is_done(tmp_path):
    path, counts = tmp_path / "run.jsonl", []
    model = stack()
    with bn.watch(model, every=2, to=path):

        def look(loss):
            counts.append({m.setting["step"] for m in read(path).measurements})

        train(model, sgd(model), batches(5), look)
    assert counts == [{0}, {0}, {0, 2}, {0, 2}, {0, 2, 4}]


def test_several_networks_share_a_file(tmp_path):
    path = tmp_path / "run.jsonl"
    first, second = stack(), stack(norm=False)
    with bn.watch(first, every=1, to=path, stack="with BN"), bn.watch(second, every=1, to=path, stack="without BN"):
        for batch in batches(3):
            train(first, sgd(first), [batch])
            train(second, sgd(second), [batch])
    found = read(path)
    assert {m.setting["stack"] for m in found.measurements} == {"with BN", "without BN"}
    assert path.read_text().count('"command"') == 1
    run(path, stack="third")
    assert read(path).measurements[: len(found.measurements)] == found.measurements


def test_the_same_run_again_replaces_its_own_records_only(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, stack="a")
    run(path, stack="b", lr=0.5)
    before = read(path).measurements
    run(path, stack="b", lr=0.25)
    after = read(path).measurements
    assert [m for m in after if m.setting["stack"] == "a"] == [m for m in before if m.setting["stack"] == "a"]
    assert len(after) == len(before)
    assert after != before


def test_a_resumed_run_goes_on_with_the_same_bins(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, steps=6, every=2)
    before = read(path).measurements
    model = stack()
    with bn.watch(model, every=2, to=path, start=4):
        train(model, sgd(model), [(100 * x, y) for x, y in batches(3)])
    after = read(path)
    assert [m for m in after.measurements if m.setting["step"] < 4] == [m for m in before if m.setting["step"] < 4]
    histograms = of(after, "histogram", "1")
    assert [m.setting["step"] for m in histograms] == [0, 2, 4, 6]
    assert len({(m.setting["low"], m.setting["high"]) for m in histograms}) == 1


def test_a_line_that_was_cut_off_is_not_built_upon(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path)
    whole = read(path).measurements
    with open(path, "ab") as stream:
        stream.write(b'{"quantity": "mean", "set')
    run(path, stack="other")
    assert read(path).measurements[: len(whole)] == whole
    assert len(read(path).measurements) == 2 * len(whole)


def test_files_of_others_are_left_alone(tmp_path):
    bench = RecordFile("bench", {}, ()).write(tmp_path / "bench.json")
    with pytest.raises(bn.BatchNormError, match="holds records of 'bench'; name a new file"):
        bn.watch(stack(), to=bench).__enter__()
    poem = tmp_path / "poem.txt"
    poem.write_text("roses are red\n")
    with pytest.raises(bn.BatchNormError, match="not a batchnorm record file"):
        bn.watch(stack(), to=poem).__enter__()
    assert poem.read_text() == "roses are red\n"
    with pytest.raises(bn.BatchNormError, match="is a folder"):
        bn.watch(stack(), to=tmp_path).__enter__()
    with pytest.raises(bn.BatchNormError, match="cannot be written"):
        bn.watch(stack(), to=poem / "run.jsonl").__enter__()


def test_an_empty_file_is_taken(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    assert len(run(path).records.measurements) > 0


PROGRAM = """
import sys, torch, batchnorm as bn
from torch import nn
model = nn.Sequential(nn.Linear(6, 6), bn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with bn.watch(model, every=1, to=sys.argv[1]) as seen:
    while True:
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.log("training loss", loss)
"""


def test_a_kill_leaves_whole_steps_and_a_reader_sees_whole_records(tmp_path):
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)])
    try:
        deadline, seen = time.monotonic() + 100, []
        while time.monotonic() < deadline and (not seen or seen[-1] < 10):
            assert process.poll() is None
            if path.exists():
                seen.append(max((m.setting["step"] for m in read(path).measurements), default=0))
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert seen[-1] >= 10
    records = read(path)
    last = max(m.setting["step"] for m in of(records, "mean"))
    per_step = [sum(m.setting["step"] == step and m.setting["layer"] != "" for m in records.measurements)
                for step in range(last)]  # fmt: skip
    assert len(set(per_step)) == 1  # all that was written is there


def test_a_reader_beside_a_writer(tmp_path):
    path, sink = tmp_path / "run.jsonl", JsonLines(tmp_path / "run.jsonl")
    sink.open(RecordFile("watch", {}, ()), "", 0)
    done, found = threading.Event(), []

    def reads():
        while not done.is_set():
            found.append(len(read(path).measurements))

    reader = threading.Thread(target=reads)
    reader.start()
    try:
        for step in range(100):
            sink.write([Measurement("mean", {"step": step, "layer": str(n)}, (1.5,) * 20) for n in range(10)])
    finally:
        done.set()
        reader.join()
    assert found == sorted(found)
    assert len(read(path).measurements) == 1000


def test_a_write_that_fails_half_way_leaves_none_of_it(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    run(path)
    before = path.read_bytes()
    real = os.write

    def full(handle, text):
        if len(text) > 20:
            return real(handle, text[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        JsonLines(path).write([Measurement("mean", {"step": 9, "layer": "x"}, (1.0,))])
    monkeypatch.undo()
    assert path.read_bytes() == before


def test_a_file_that_fails_does_not_stop_the_training(tmp_path, monkeypatch):
    def full(self, measurements):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    with pytest.warns(bn.BatchNormWarning, match="'JsonLines' failed at step 0") as warned:
        seen = run(tmp_path / "run.jsonl")
    assert len(warned) == 1
    assert "No space left" in seen.failed["JsonLines"]
    assert {m.setting["step"] for m in of(seen.records, "mean")} == {2}  # from then on in memory


def test_the_sinks_that_a_user_can_give(tmp_path):
    memory = Memory()
    sinks = sinks_of([tmp_path / "a.jsonl", str(tmp_path / "b.jsonl"), memory])
    assert [type(sink) for sink in sinks] == [JsonLines, JsonLines, Memory]
    seen = run([tmp_path / "a.jsonl", memory])
    assert memory.records().measurements == read(tmp_path / "a.jsonl").measurements == seen.records.measurements
    assert memory.records().configuration["every"] == 2


def test_a_memory_is_shared_as_a_file_is():
    memory = Memory()
    run(memory, stack="a")
    run(memory, stack="b")
    run(memory, stack="b")
    stacks = [m.setting["stack"] for m in memory.records().measurements]
    assert stacks.count("a") == stacks.count("b") > 0


def test_lines_are_read_back_as_they_were():
    record = Measurement("mean", {"step": 0, "layer": "<script>\n\u2028"}, (0.1, float("inf")), "s")
    assert line(record).count("\n") == header_line(RecordFile("watch", {}, ())).count("\n") == 1
    assert json.loads(line(record))["samples"] == [0.1, None]


# ---- TensorBoard


@pytest.fixture
def events():
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def load(folder):
        found = loader.EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
        found.Reload()
        return found

    return load


def test_tensorboard_gets_scalars_and_histograms(tmp_path, events):
    seen = run([TensorBoard(tmp_path / "runs"), Memory()], stack="with BN")
    found = events(tmp_path / "runs")
    scalars, histograms = set(found.Tags()["scalars"]), found.Tags()["histograms"]
    assert {"with BN/mean/1", "with BN/percentiles/1/15", "with BN/gap/1/variance", "with BN/gamma/1/max",
            "with BN/gradient norm/0", "with BN/training loss"} <= scalars  # fmt: skip
    assert set(histograms) == {f"with BN/histogram/{layer}" for layer in ("1", "2", "4", "5", "6")}
    for record in of(seen.records, "mean", "2"):
        event = next(e for e in found.Scalars("with BN/mean/2") if e.step == record.setting["step"])
        assert event.value == pytest.approx(record.samples[0], rel=1e-6)
    for record, event in zip(of(seen.records, "histogram", "2"), found.Histograms("with BN/histogram/2"), strict=True):
        value = event.histogram_value
        assert event.step == record.setting["step"]
        assert value.num == 48
        assert list(value.bucket)[1:-1] == list(record.samples)
        assert value.bucket_limit[0] == record.setting["low"]
        assert value.bucket_limit[-2] == pytest.approx(record.setting["high"])
        assert value.sum / value.num == pytest.approx(of(seen.records, "mean", "2")[0].samples[0], abs=0.3)


def test_the_users_writer_is_used_and_left_open(tmp_path, events):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    seen = run(writer)
    writer.add_scalar("mine", 1.0, 0)
    writer.close()
    found = events(tmp_path)
    assert {"mine", "mean/1", "training loss"} <= set(found.Tags()["scalars"])
    assert len(seen.records.measurements) > 0  # kept in memory, since TensorBoard is not read back


def test_without_tensorboard_one_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(bn.BatchNormError, match=r"TensorBoard is not installed .*pip install tensorboard"):
        bn.watch(stack(), to=TensorBoard(tmp_path)).__enter__()
