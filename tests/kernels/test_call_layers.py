"""Whole layers in C: the same results as ``forward`` in Python, which handles all calls that are not plain."""

import copy
import gc
import itertools
import threading

import pytest
import torch
from call_cases import NONE, WHY
from torch import nn

import batchnorm as bn
from batchnorm.kernels import call

pytestmark = pytest.mark.skipif(NONE, reason=WHY)

INPUTS = {bn.BatchNorm1d: (6, 24, 10), bn.BatchNorm2d: (4, 24, 5, 6), bn.BatchNorm3d: (2, 24, 3, 4, 5)}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def made(kind=bn.BatchNorm2d, **options):
    """A layer whose parameters and statistics are no round numbers."""
    layer = kind(24, **options)
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.running_mean):
            if tensor is not None:
                tensor.normal_()
        if layer.running_var is not None:
            layer.running_var.uniform_(0.5, 2)
    return layer


def is_served(layer, x, residual=None):
    return call.compiled.layer(layer, x, residual) is not None


def step(layer, x, residual, way, monkeypatch):
    """Outputs, gradients and state after a step, called from C ("c") or from Python ("python")."""
    layer = copy.deepcopy(layer)
    with monkeypatch.context() as patch:
        if way == "python":
            patch.setattr(call, "compiled", None)
        y = layer(x, residual)
        wanted = [t for t in (x, residual, *layer.parameters()) if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(y.square().sum(), wanted) if y.requires_grad else ()
    state = layer.state_dict()
    return {"y": y, **{f"gradient {i}": g for i, g in enumerate(gradients)}, **state}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "leaky_relu", "silu"])
def test_it_is_forward_to_the_bit(monkeypatch, kind, activation, residual):
    layer = made(kind, activation=activation, negative_slope=0.3, momentum=0.3, eps=0.01)
    x = torch.randn(INPUTS[kind], requires_grad=True)
    r = torch.randn(INPUTS[kind], requires_grad=True) if residual else None
    assert is_served(copy.deepcopy(layer), x, r)
    for training in (True, False):
        layer.train(training)
        assert same(step(layer, x, r, "c", monkeypatch), step(layer, x, r, "python", monkeypatch))


@pytest.mark.parametrize("track", [True, False], ids=["tracking", "not tracking"])
@pytest.mark.parametrize("statistics", ["auto", "batch", "running"])
def test_every_position_of_the_switches(monkeypatch, statistics, track):
    x = torch.randn(INPUTS[bn.BatchNorm2d], requires_grad=True)
    served = 0
    for update, training, affine in itertools.product((None, True, False), (True, False), (True, False)):
        layer = made(statistics=statistics, update=update, affine=affine, track_running_stats=track).train(training)
        if statistics == "running" and not track:  # there are none, and both ways say so
            with pytest.raises(bn.errors.BatchNormError, match="running"):
                layer(x)
            assert not is_served(layer, x)
            continue
        assert same(step(layer, x, None, "c", monkeypatch), step(layer, x, None, "python", monkeypatch))
        served += is_served(layer, x)
    assert served > 0 or (statistics == "running" and not track)


def test_a_layer_that_only_looks_at_a_batch_is_left_as_it_was():
    layer = made(update=False)
    before = copy.deepcopy(layer.state_dict())
    versions = [buffer._version for buffer in layer.buffers()]
    layer(torch.randn(INPUTS[bn.BatchNorm2d]))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert [buffer._version for buffer in layer.buffers()] == versions


def parametrized():
    layer = made()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def changed(**attributes):
    def make():
        layer = made()
        for name, value in attributes.items():
            object.__setattr__(layer, name, value)
        return layer

    return make


def changed_buffer(**buffers):
    def make():
        layer = made()
        layer._buffers.update(buffers)
        return layer

    return make


class Own(bn.BatchNorm2d):
    """A user's subclass, which may change anything."""


DECLINED = {
    "a subclass": lambda: made(Own),
    "a layer for fewer dimensions": lambda: made(bn.BatchNorm1d),
    "an average of all batches": lambda: made(momentum=None),
    "a parameter that is computed": parametrized,
    "a weight that hides the parameter": changed(weight=torch.ones(24)),
    "a count that hides the buffer": changed(num_batches_tracked=torch.tensor(3)),
    "no count": changed(_buffers={"running_mean": torch.zeros(24), "running_var": torch.ones(24)}),
    "a count of another kind": changed_buffer(num_batches_tracked=torch.tensor(2.0)),
    "parameters for more channels": lambda: bn.BatchNorm2d(25),
    "another dtype": lambda: made().double(),
    "statistics of no known kind": changed(statistics="mine"),
    "an activation of no known kind": changed(activation="gelu"),
    "a switch that is no bool": changed(update=1),
    "another that is none": changed(track_running_stats=1),
    "a count of several numbers": changed_buffer(num_batches_tracked=torch.zeros(2, dtype=torch.int64)),
    "a number that is none": changed(eps="small"),
    "a mode that is no bool": changed(training=1),
    "updates while running statistics normalise": lambda: made(statistics="running", update=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", DECLINED)
def test_what_is_not_plain_is_left_to_python(kind):
    layer, x = DECLINED[kind](), torch.randn(INPUTS[bn.BatchNorm2d])
    before = copy.deepcopy(layer._buffers)
    assert not is_served(layer, x)
    assert all(a is b or torch.equal(a, b) for a, b in zip(layer._buffers.values(), before.values(), strict=True))
    assert is_served(made(), x)


@pytest.mark.parametrize("missing", ["statistics", "update", "activation", "negative_slope", "momentum", "training"])
def test_a_layer_from_another_version_lacks_something(missing):
    layer = made()
    del layer.__dict__[missing]
    assert not is_served(layer, torch.randn(INPUTS[bn.BatchNorm2d]))


@pytest.mark.parametrize(
    "x", [None, 3, torch.randn(4, 24), torch.randn(4, 24, 5, 6, device="meta"), torch.randn(4, 24, 5, 6).to_sparse()]
)
def test_an_input_of_another_kind(x):
    layer = made()
    assert not is_served(layer, x)
    assert not is_served(layer, torch.randn(4, 24, 5, 6), residual=3)
    assert int(layer.num_batches_tracked) == 0


class Number:
    """A number that gives its layer other tensors when it is read, as another thread might."""

    def __init__(self, value, layer):
        self.value, self.layer = value, layer

    def __float__(self):
        for name, tensor in self.layer._buffers.items():
            self.layer._buffers[name] = tensor.clone()
        self.layer.weight = nn.Parameter(torch.ones(24))
        gc.collect()
        return self.value


def test_tensors_that_are_exchanged_while_a_number_is_read():
    layer = made()
    mean = layer.running_mean
    layer.eps = Number(1e-5, layer)
    for _ in range(20):
        assert is_served(layer, torch.randn(INPUTS[bn.BatchNorm2d]))
    assert layer.running_mean is not mean


def test_an_interrupt_is_not_swallowed():
    class Interrupting:
        def __float__(self):
            raise KeyboardInterrupt

    layer = made()
    layer.eps = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        layer(torch.randn(INPUTS[bn.BatchNorm2d]))


def test_hooks_are_called():
    layer, seen = made(), []
    layer.register_forward_pre_hook(lambda module, given: seen.append("before"))
    layer.register_forward_hook(lambda module, given, y: seen.append("after"))
    x = torch.randn(INPUTS[bn.BatchNorm2d], requires_grad=True)
    y = layer(x)
    y.register_hook(lambda dy: seen.append("back"))
    y.sum().backward()
    assert seen == ["before", "after", "back"]


def test_a_batch_that_is_not_finite_is_told_once_and_counted_never():
    x = torch.randn(INPUTS[bn.BatchNorm2d])
    x[1, 2, 3, 4] = float("inf")
    layer = made()
    mean = layer.running_mean.clone()
    with pytest.warns(bn.errors.BatchNormWarning, match="NaN or infinite") as caught:
        y = layer(x)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert y.shape == x.shape
    assert int(layer.num_batches_tracked) == 0
    assert torch.equal(layer.running_mean, mean)
    with pytest.raises(bn.errors.NonFiniteBatch):
        made(nonfinite="raise")(x)


def test_inference_mode_and_no_grad(monkeypatch):
    layer, x = made().eval(), torch.randn(INPUTS[bn.BatchNorm2d])
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = layer(x)
            with monkeypatch.context() as patch:
                patch.setattr(call, "compiled", None)
                expected = layer(x)
        assert torch.equal(y, expected)
        assert (y.is_inference(), y.requires_grad) == (expected.is_inference(), False)


def test_what_comes_out_can_be_used_but_not_resized():
    """As memory from NumPy; `call_tensors.h` says what it is for."""
    y = made()(torch.randn(INPUTS[bn.BatchNorm2d])).detach()
    assert y.clone().add_(1).untyped_storage().resizable()
    assert copy.deepcopy(y).equal(y)
    assert y.numpy().sum() == pytest.approx(float(y.sum()), abs=1e-3)
    with pytest.raises(RuntimeError, match="not resizable"):
        y.untyped_storage().resize_(0)


def test_parameters_that_are_exchanged_while_the_kernel_runs():
    layer, stop = made(), threading.Event()

    def exchange():
        while not stop.is_set():
            layer.weight = nn.Parameter(torch.ones(24))
            layer.running_mean = torch.zeros(24)

    thread = threading.Thread(target=exchange)
    thread.start()
    x = torch.randn(32, 24, 30, 30, requires_grad=True)
    try:
        results = [layer(x) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert all(bool(y.isfinite().all()) for y in results)
