"""Ctrl-C at any moment: exit code 130, one sentence, no part of a file; and the model of a caller is put back."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from running import NET, SOURCE, start
from torch import nn

import batchnorm as bn
from batchnorm import interrupts
from batchnorm.checkpoints import load_state
from batchnorm.files import replacing, write_atomically
from batchnorm.preserve import untouched
from batchnorm.specs import called
from batchnorm.terminal import ended

HERE = pathlib.Path(__file__).parent
COMMANDS = {
    "calibrate": ("calibrate net.py:make --data data.npz --out o.pt --json o.json", ["o.json", "o.pt"]),
    "fold": ("fold net.py:make --input 4,3 --out o.safetensors", ["o.safetensors"]),
    "check": ("check net.py:make --input 4,3 --fix --out o.pt", ["o.pt"]),
    "report": ("report records.json --out o.html", ["o.html"]),
    "rules": ("rules", []),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_moment_ends_with_130_and_one_sentence(folder, name):
    bn.records.RecordFile("fold", {}, ()).write(folder / "records.json")
    command, written = COMMANDS[name]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    program = [sys.executable, HERE / "interrupted.py", "3", "16", *command.split()]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200, cwd=folder)
    whole, *trials = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert whole["code"] in (0, 1)
    assert len(trials) == 16
    there = {"net.py", "data.npz", "model.pt", "records.json"}
    assert set(whole["left"]) == there | set(written)
    for trial in trials:
        *before, last = trial["errors"].splitlines()
        assert (trial["code"], last) == (130, "batchnorm: interrupted"), trial
        assert all(line.startswith("written to o.pt") for line in before), trial
        assert set(trial["left"]) <= there | set(written), trial


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_and_real_signals(folder, number):
    """At moments of the clock: from the start of the command to its end, imports included."""
    (folder / "net.py").write_text(f"import time\ntime.sleep(0.2)\n{NET}\n")
    lines = (
        "import time, torch",
        "def data():",
        "    while True:",
        "        time.sleep(0.1)",
        "        yield torch.ones(8, 3)",
    )
    (folder / "slow.py").write_text("\n".join(lines))
    for seconds in (0.4, 1.0, 2.0):
        process = start("calibrate", "net.py:make", "--data", "slow.py:data", "--out", "o.pt")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        if process.returncode == -number:
            continue  # before the command began
        assert (process.returncode, err) == (128 + number, "batchnorm: interrupted\n")
        assert not [name for name in os.listdir(folder) if "o.pt" in name]


@pytest.fixture
def listening():
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    hook = sys.unraisablehook
    interrupts.remember()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook
    interrupts.accept()


class Swallows:
    """Code that loses an exception: a destructor, or a handler that takes everything."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def swallowed_in_a_destructor():
    one = Swallows()
    del one


def swallowed_by_a_handler():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        return


def turned_into_another_error():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        raise ImportError("numpy failed to import") from error


@pytest.mark.parametrize(
    "lose", [swallowed_in_a_destructor, swallowed_by_a_handler, turned_into_another_error], ids=lambda f: f.__name__
)
def test_an_interrupt_that_is_swallowed_still_ends_the_command(listening, capsys, tmp_path, lose):
    def command():
        lose()
        write_atomically(tmp_path / "result.json", "{}")

    assert ended(command) == 130
    assert capsys.readouterr().err == "batchnorm: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_swallowed_interrupt_is_met_at_the_next_batch_and_at_the_end(listening, capsys):
    def batches():
        swallowed_by_a_handler()
        called("the next batch", lambda: pytest.fail("this is not reached"))

    assert ended(batches) == 130
    for number in interrupts.SIGNALS:
        signal.signal(number, signal.default_int_handler)
    interrupts.remember()
    assert ended(swallowed_by_a_handler) == 130
    assert capsys.readouterr().err == "batchnorm: interrupted\n" * 2


def test_a_command_may_accept_an_interrupt_and_keep_what_is_done(listening, capsys, tmp_path):
    def command():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            interrupts.accept()
        write_atomically(tmp_path / "result.json", "{}")
        return 130

    assert ended(command) == 130
    assert capsys.readouterr().err == ""
    assert (tmp_path / "result.json").exists()


def test_an_interrupt_within_torch_s_import_waits_for_its_end(listening):
    frame = {"__name__": "torch._later", "signal": signal, "reached": []}
    exec(compile("signal.raise_signal(signal.SIGINT)\nreached.append(1)", "later.py", "exec"), frame)
    assert frame["reached"], "an exception within the import of torch ends the process"
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
    assert interrupts.pending() == signal.SIGINT


def test_two_files_are_replaced_together(listening, tmp_path, monkeypatch):
    real = os.replace

    def replace(*paths):
        real(*paths)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", replace)

    def write():
        with replacing(tmp_path / "m.onnx") as temporary:
            temporary.write_text("model")
            temporary.with_name("m.onnx.data").write_text("weights")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


# ---- the model of a caller


class Interrupt:
    """Raise KeyboardInterrupt at a call of Python code, or count the calls."""

    def __init__(self, at=0):
        self.at, self.calls = at, 0

    def __call__(self, frame, event, argument):
        # What contextlib calls between a with and the block is not ours to protect, nor are torch's stacks of modes.
        if frame.f_code.co_filename.endswith(
            ("contextlib.py", "torch/overrides.py", "torch/utils/_python_dispatch.py")
        ):
            return
        self.calls += 1
        if self.calls == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), bn.BatchNorm1d(4))
    model[1].eval()
    model[0].register_forward_hook(lambda *_: None)
    return model


def state(model):
    return [
        (
            path,
            type(module),
            module.training,
            sorted(vars(module)),
            [id(hook) for hook in module._forward_hooks.values()],
            [id(hook) for hook in module._forward_pre_hooks.values()],
            {name: (id(t), t.tolist()) for name, t in [*module.named_parameters(), *module.named_buffers()]},
        )
        for path, module in model.named_modules()
    ] + [torch.get_rng_state().tolist()]


def runs(model):
    with untouched(model):
        model.train()
        model[0].register_forward_hook(lambda *_: None)
        model.extra = nn.ReLU()
        model(torch.randn(6, 3))


VERBS = {
    "untouched": runs,
    "check": lambda model: bn.check(model, example=torch.randn(6, 3, generator=torch.Generator().manual_seed(0))),
    "fold": lambda model: bn.fold(model.eval(), torch.ones(6, 3)),
}


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt while a generator is closed
def test_an_interrupted_verb_puts_the_model_back(name):
    model = network().eval() if name == "fold" else network()
    VERBS[name](model)  # imports
    before = state(model)
    count = Interrupt()
    sys.settrace(count)
    try:
        VERBS[name](model)
    finally:
        sys.settrace(None)
    assert state(model) == before
    few = range(1, count.calls + 1)
    for at in few if count.calls < 150 else sorted(random.Random(0).sample(few, 60)):
        sys.settrace(Interrupt(at))
        try:
            VERBS[name](model)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert state(model) == before, at


def test_what_was_written_before_an_interrupt_is_whole(folder):
    """A write that is interrupted at each of its calls leaves the old file or the new one, and nothing else."""
    old, new = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    path = folder / "model.pt"
    for at in range(1, 60):
        bn.loading.save_state(old, path)
        sys.settrace(Interrupt(at))
        try:
            bn.loading.save_state(new, path)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert load_state(path)["w"].tolist() in ([0, 0, 0], [1, 1, 1])
        assert sorted(name for name in os.listdir(folder) if name != "__pycache__") == [
            "data.npz",
            "model.pt",
            "net.py",
        ]
