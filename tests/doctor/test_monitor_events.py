"""What a monitor sees of a run, in which order, and what it can bear: models that raise, wrappers, checkpoints."""

import copy

import pytest
import torch
from monitored import Log, network, sgd, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.doctor.watcher import Pass, Watcher


def test_a_rule_that_breaks_is_left_out_and_the_training_goes_on(watched):
    class Broken(Watcher):
        passes = 0

        def on_pass(self, run, seen):
            self.passes += 1
            raise ZeroDivisionError("a bug of ours")
            yield

    model, broken = network(), Broken()
    optimizer = sgd(model)
    with watched(broken, model, optimizer, warn=True) as run:
        train(model, optimizer)
    assert run.step == 3
    assert broken.passes == 1
    assert run.failed == {"BN999": "ZeroDivisionError: a bug of ours"}
    assert "BN999 failed here: ZeroDivisionError: a bug of ours" in str(run.findings)


def test_a_model_that_raises(watched):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fail = network(), True

        def forward(self, x):
            y = self.net(x)
            if self.fail:
                raise RuntimeError("out of memory")
            return y

    log, model = Log(), Raises()
    with watched(log, model) as run:
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.randn(8, 3))
        model.fail = False
        model(torch.randn(8, 3))
    assert run.call == 2
    assert [e for e in log.events if e[0] in ("call", "return")] == [
        ("call", 1, 1, []), ("return", False), ("call", 2, 1, []), ("return", True),
    ]  # fmt: skip


def test_an_interrupt_inside_a_call_does_not_make_the_next_one_seem_nested(watched):
    class Interrupted(nn.ReLU):
        now = True

        def forward(self, x):
            if self.now:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Interrupted(), nn.Linear(4, 1))
    optimizer = sgd(model)
    with watched(Log(), model, optimizer) as run:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(8, 3))
        model[2].now = False
        optimizer.step()
        train(model, optimizer)
    assert run.call == 4


def test_a_model_that_calls_itself_is_one_call(watched):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, depth=2):
            x = self.norm(x)
            return self(x, depth=depth - 1) if depth else x

    log = Log()
    with watched(log, Recursive()) as run:
        run.model(torch.randn(8, 3), depth=1)
    assert run.call == 1
    assert [e for e in log.events if e[0] in ("call", "pass")] == [
        ("call", 1, 1, ["depth"]), ("pass", "norm", 1, 0), ("pass", "norm", 1, 0),
    ]  # fmt: skip


def test_part_of_the_model_in_evaluation_mode(watched):
    log, model = Log(), nn.Sequential(network(), nn.Linear(1, 3), network())
    model[0].eval()
    with watched(log, model):
        model(torch.randn(8, 3))
    assert [(p["path"], p["from_batch"], p["updates"]) for p in log.passes] == [
        ("0.1", False, False), ("2.1", True, True),
    ]  # fmt: skip


SWITCHES = {
    "torch": (nn.BatchNorm1d(4), True, True),
    "torch, eval": (nn.BatchNorm1d(4).eval(), False, False),
    "torch, untracked": (nn.BatchNorm1d(4, track_running_stats=False).eval(), True, False),
    "torch, momentum 0": (nn.BatchNorm1d(4, momentum=0.0), True, False),
    "ours": (bn.BatchNorm1d(4), True, True),
    "ours, eval": (bn.BatchNorm1d(4).eval(), False, False),
    "running, updated": (bn.BatchNorm1d(4, statistics="running", update=True), False, True),
    "batch, in eval": (bn.BatchNorm1d(4, statistics="batch").eval(), True, False),
    "update=False": (bn.BatchNorm1d(4, update=False), True, False),
    "one value": (bn.BatchNorm1d(4, one_value="running"), False, False),
    "frozen": (bn.freeze(nn.BatchNorm1d(4))[0], False, False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_pass_says_is_what_the_layer_does(name, watched):
    layer, from_batch, updates = SWITCHES[name]
    layer, log = copy.deepcopy(layer), Log()
    before = None if layer.running_mean is None else layer.running_mean.clone()
    x = torch.randn(1 if name == "one value" else 8, 4) + 3
    with watched(log, layer):
        y = layer(x)
    (seen,) = log.passes
    assert (seen["from_batch"], seen["updates"]) == (from_batch, updates)
    assert updates == (before is not None and not torch.equal(before, layer.running_mean))
    assert from_batch == bool(y.mean().abs() < 1e-3)


def test_the_moments_of_a_pass():
    layer, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    seen = Pass("", layer, x, x, None, True, True, True, False, 1)
    torch.testing.assert_close(seen.moments.mean.float(), x.mean(0))
    torch.testing.assert_close(seen.moments.var.float(), x.var(0, unbiased=False))
    assert seen.moments is seen.moments
    assert seen.values == 8


def test_events_in_their_order(watched):
    log, model, ema = Log(), network(), network()
    optimizer = sgd(model)
    with watched(log, model, optimizer, copies={"ema": ema}):
        train(model, optimizer, 1)
        ema(torch.randn(8, 3))
    assert log.events == [
        "begin", ("call", 1, 1, []), ("pass", "1", 1, 0), ("module", "2"), ("return", True), ("backward", "1"),
        ("step", 0, 1), ("copy", "ema"), "end",
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "looked"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (50, [0])])
def test_every(every, looked, watched):
    class Looks(Watcher):
        def __init__(self):
            self.at = []

        def on_pass(self, run, seen):
            if run.looking:
                self.at.append(run.step)
            return ()

    looks, log, model = Looks(), Log(), network()
    optimizer = sgd(model)
    with watched(looks, model, optimizer, every=every):
        train(model, optimizer, 6)
    assert looks.at == looked
    with watched(log, model, optimizer, every=every):
        train(model, optimizer, 6)
    assert log.events.count(("module", "2")) == len(looked)


def test_before_the_first_step_calls_are_counted_instead(watched):
    log, model = Log(), network()
    with watched(log, model, every=3):
        for _ in range(7):
            model(torch.randn(8, 3))
    assert log.events.count(("module", "2")) == 3


def test_a_wrapper_and_what_is_in_it(watched):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    log, inner = Log(), network()
    outer = Wrapper(inner)
    with watched(log, outer) as run:
        outer(torch.randn(8, 3))
        inner(torch.randn(8, 3))  # an evaluation without the wrapper
    assert run.call == 2
    assert [p["path"] for p in log.passes] == ["module.1", "module.1"]
    log = Log()
    with watched(log, inner) as run:
        outer(torch.randn(8, 3))
    assert (run.call, log.passes[0]["path"]) == (1, "1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_pass_is_recomputed_and_was_for_gradients(reentrant, watched):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=reentrant)

    log, model = Log(), Model()
    with watched(log, model):
        model(torch.randn(8, 3, requires_grad=True)).sum().backward()
    assert [(p["recomputed"], p["gradients"]) for p in log.passes] == [(False, True), (True, True)]


class _Parts(nn.Module):
    """A program that calls ``forward`` itself, or parts of a model in a list."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([network(), nn.Linear(1, 1)])
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


@pytest.mark.parametrize("around", [lambda m: m, lambda m: {"m": m}, lambda m: {"m": nn.ModuleList([m])}])
@pytest.mark.parametrize("call", [lambda m, x: m.forward(x), lambda m, x: m.parts[0](x), lambda m, x: m(x)])
def test_calls_of_parts_and_of_forward_itself_are_seen(around, call):
    model = _Parts()
    optimizer = sgd(model)
    with bn.monitor(around(model), optimizer, warn=False) as run:
        for x in torch.randn(4, 8, 3):
            optimizer.zero_grad()
            call(model, x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            call(model, torch.randn(8, 3))  # a validation in training mode
    assert run.call >= 5
    assert "BN301" in run.findings.codes
