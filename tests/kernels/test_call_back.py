"""The backward pass in C: every kind of gradient, hooks on saved tensors, and no memory leaked."""

import contextlib
import gc
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from call_cases import NONE, WHY, ran_in_c, tensor
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.kernels import call

pytestmark = pytest.mark.skipif(NONE, reason=WHY)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def step(way, monkeypatch, backward, residual=True, activation="relu"):
    torch.manual_seed(1)
    layer = bn.BatchNorm2d(32, activation=activation)
    x, r = (torch.randn(4, 32, 5, 5, requires_grad=True) for _ in range(2))
    with monkeypatch.context() as patch:
        if way == "python":
            patch.setattr(call, "compiled", None)
        y = layer(x, r if residual else None)
        assert ran_in_c(y) == (way == "c")
    return backward(y, [x, layer.weight, layer.bias, *([r] if residual else [])])


def twice(y, inputs):
    first = torch.autograd.grad(y, inputs, torch.cos(y.detach()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, materialize_grads=True)
    return (*first, *second)


BACKWARDS = {
    "expanded gradient": lambda y, inputs: torch.autograd.grad(y.sum(), inputs),
    "gradient of another layout": lambda y, inputs: torch.autograd.grad(
        y, inputs, torch.cos(y.detach()).contiguous(memory_format=torch.channels_last)
    ),
    "twice": twice,
    "the same graph twice": lambda y, inputs: (
        *torch.autograd.grad(y, inputs, torch.cos(y.detach()), retain_graph=True),
        *torch.autograd.grad(y, inputs, torch.cos(y.detach())),
    ),
    "a batch of gradients": lambda y, inputs: torch.autograd.grad(
        y, inputs, torch.stack([torch.cos(y.detach()), torch.ones_like(y)]), is_grads_batched=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", BACKWARDS)
def test_every_way_back(monkeypatch, kind, residual, activation):
    ours, theirs = (step(way, monkeypatch, BACKWARDS[kind], residual, activation) for way in ("c", "python"))
    assert len(ours) == len(theirs) > 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


HOOKS = {
    "other strides": lambda t: t.double().to(t.dtype).permute(*reversed(range(t.dim()))).contiguous().permute(
        *reversed(range(t.dim()))
    ),
    "another dtype": lambda t: t.double(),
    "a copy": lambda t: t.clone(),
}  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_saved_tensors(monkeypatch, kind, activation):
    def give(y, inputs):
        return torch.autograd.grad(y, inputs, torch.cos(y.detach()))

    def packed(way):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (HOOKS[kind](t), t.dtype), lambda p: p[0].to(p[1])):
            return step(way, monkeypatch, give, activation=activation)

    ours, theirs = packed("c"), packed("python")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["dense", "expanded gradient"])
def test_checkpointing_gives_saved_tensors_out_once(kind, reentrant):
    def give(run):
        torch.manual_seed(1)
        layer = bn.BatchNorm1d(64, activation="relu")
        x = torch.randn(32, 64, requires_grad=True)
        y = run(layer, x)
        y.backward(torch.cos(y.detach()) if kind == "dense" else torch.ones(()).expand_as(y))
        return x.grad, layer.weight.grad, layer.bias.grad

    ours = give(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(ours, give(lambda layer, x: layer(x)), strict=True))


def test_a_residual_is_kept_for_silu_alone(monkeypatch):
    for activation, needed in (("relu", False), ("silu", True)):
        layer = bn.BatchNorm1d(64, activation=activation)
        x, residual = tensor("rows").requires_grad_(), tensor("rows")
        y = layer(x, residual)
        assert ran_in_c(y)
        residual.add_(1)
        if needed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(torch.ones_like(y))
        else:
            y.backward(torch.ones_like(y))


def backwards(t):
    """The same numbers, the other way round in memory."""
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


CHANGES = {  # which of the tensors that are saved, and what becomes of it
    "x": (lambda t: t.dim() == 4, backwards),
    "silu's residual": (lambda t: t.dim() == 4 and float(t.detach().mean()) > 2, backwards),
    "a parameter": (lambda t: t.dim() == 1 and t.dtype is torch.float32, torch.Tensor.double),
    "notes with gaps": (lambda t: t.dtype is torch.uint8, lambda t: t.repeat_interleave(2)[::2]),
    "notes as numbers": (lambda t: t.dtype is torch.uint8, torch.Tensor.float),
    "notes at an odd place": (lambda t: t.dtype is torch.uint8, lambda t: torch.cat((t[:1], t))[1:]),
    "x in more digits": (lambda t: t.dim() == 4, torch.Tensor.double),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_hooks_make_of_saved_tensors(monkeypatch, kind, activation, training):
    concerns, change = CHANGES[kind]

    def run(hooked, again):
        torch.manual_seed(2)
        layer = bn.BatchNorm2d(32, activation=activation).train(training)
        x, r = (torch.randn(4, 32, 5, 5).add(mean).requires_grad_() for mean in (0, 3))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: change(t) if concerns(t) else t)
        with hooks if hooked else contextlib.nullcontext():
            y = layer(x, r)
        assert ran_in_c(y)
        dy = torch.randn_like(y.detach())
        dy = backwards(dy) if kind == "x" else dy  # with the strides that the hook gives
        wanted = [x, r, layer.weight, layer.bias]
        first = torch.autograd.grad(y, wanted, dy, create_graph=again)
        if not again:
            return first
        return (*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted, materialize_grads=True))

    for again in (False, True):
        for a, b in zip(run(True, again), run(False, again), strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_notes_that_a_hook_has_cut():
    layer, x = bn.BatchNorm1d(64, activation="relu"), tensor("rows").requires_grad_()
    cut = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:-1] if t.dtype is torch.uint8 else t)
    with cut:
        y = layer(x, tensor("rows"))
    with pytest.raises(BatchNormError, match="a hook on saved tensors gave back 1539 bytes of the 1540"):
        y.backward(torch.ones_like(y))


def test_a_graph_that_is_gone_and_an_input_that_has_changed():
    layer = bn.BatchNorm1d(64)
    x = tensor("rows").requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(torch.ones_like(y))
    y = layer(x)
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


def test_gradients_begin_at_a_cache_line_and_outlive_their_graph():
    x, dy = (torch.randn(64, 96, 11, requires_grad=grad) for grad in (True, False))
    layer = bn.BatchNorm1d(96, activation="relu")
    dx, dweight = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    assert dx.data_ptr() % 64 == dweight.data_ptr() % 64 == 0
    kept, expected = dx[3:5], dx[3:5].clone()
    del dx, layer, x
    gc.collect()
    for _ in range(20):
        torch.full((64, 96, 11), 7.0)
    assert torch.equal(kept, expected)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks Linux how much memory there is")
def test_nothing_is_left_behind():
    x, r, dy = (torch.randn(64, 64, 64, requires_grad=grad) for grad in (True, True, False))  # 1 MB
    layer = bn.BatchNorm1d(64, activation="relu")

    def steps(count):
        for _ in range(count):
            torch.autograd.grad(layer(x, r), [x, r, layer.weight, layer.bias], dy)
            torch.autograd.grad(layer(x, r).sum(), [x, r])
            with torch.no_grad():
                layer(x)

    def megabytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def odd_steps(count):
        """Ways that end elsewhere: the other backward pass, a batch that is refused, an input that is not served."""
        small = torch.randn(32, 64, requires_grad=True)
        bad = torch.full((32, 64), float("nan"))
        flat = bn.BatchNorm1d(64, activation="relu")
        for _ in range(count):
            torch.autograd.grad(flat(small).sum(), [small], create_graph=True)
            flat(small[:, :64].t().contiguous().t())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flat(bad)
            flat.nonfinite = "raise"
            with contextlib.suppress(bn.errors.NonFiniteBatch):
                flat(bad)
            flat.nonfinite = "reject"

    def blocks():
        gc.collect()
        return sys.getallocatedblocks()

    for many in (steps, odd_steps):
        many(200)
        before = blocks()
        many(300)
        assert blocks() - before < 200, many.__name__  # one object left behind a step would be 300
    steps(5)
    gc.collect()
    counted = [
        kernels._kernel,
        layer.__dict__,
        call.compiled,
        layer.eps,
        layer.weight,
        layer.running_mean,
        x,
        r,
        dy,
        call.differentiable.gradients,
        torch.float32,
    ]
    before, references = megabytes(), [sys.getrefcount(thing) for thing in counted]
    objects = len(gc.get_objects())
    steps(100)
    gc.collect()
    assert megabytes() - before < 40  # one tensor left behind a step would be 100
    assert [sys.getrefcount(thing) for thing in counted] == references
    assert abs(len(gc.get_objects()) - objects) < 50
