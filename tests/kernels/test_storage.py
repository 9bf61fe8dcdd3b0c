"""Tensors whose storage was freed or shrunk: one sentence on every path, and no memory of others is read or written."""

import copy
import os
import subprocess
import sys

import pytest
import torch

import batchnorm as bn
from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.functional import batch_norm, moments
from batchnorm.kernels import call

C = 64
FREED = {
    "freed": lambda storage: storage.resize_(0),
    "shrunk": lambda storage: storage.resize_(storage.nbytes() // 2),
    "one byte short": lambda storage: storage.resize_(storage.nbytes() - 1),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def given(dtype=torch.float32):
    shape = (8, C, 4, 4)
    return {
        "x": torch.randn(shape).to(dtype),
        "running_mean": torch.zeros(C),
        "running_var": torch.ones(C),
        "weight": torch.ones(C),
        "bias": torch.zeros(C),
        "residual": torch.randn(shape).to(dtype),
    }


WORDS = {"x": "the input", "residual": "the residual"}


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("name", given())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_argument_without_its_memory_is_named(path, name, how, training):
    arguments = given()
    FREED[how](arguments[name].untyped_storage())
    with pytest.raises(BatchNormError, match=f"the memory of {WORDS.get(name, name)} was freed: .* needs .* bytes"):
        batch_norm(**arguments, training=training)
    if name != "running_mean":
        assert torch.equal(arguments["running_mean"], torch.zeros(C))  # nothing was done


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_of_every_dtype(path, dtype):
    x = torch.randn(8, C).to(dtype)
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - 2)
    with pytest.raises(BatchNormError, match="the memory of the input was freed"):
        batch_norm(x, None, None, training=True)


def test_a_view_is_measured_by_where_it_ends(path):
    """A storage longer than the tensor can be too short all the same; one that ends with the tensor is not."""
    base = torch.randn(3 * C)
    weight = base[2 * C :]
    x = torch.randn(8, C)
    whole = batch_norm(x, None, None, weight, training=True)
    assert torch.allclose(whole, torch.nn.functional.batch_norm(x, None, None, weight, training=True), atol=1e-5)
    base.untyped_storage().resize_(4 * (3 * C - 1))
    with pytest.raises(
        BatchNormError, match=r"weight was freed: its shape \[64\] needs 768 bytes, its storage has 764"
    ):
        batch_norm(x, None, None, weight, training=True)
    front = base[:C]  # its part is still there
    assert torch.equal(
        batch_norm(x, None, None, front, training=True), batch_norm(x, None, None, front.clone(), training=True)
    )


def test_a_tensor_that_was_set_to_a_storage_it_does_not_fit(path):
    x = torch.randn(8, C)
    small = torch.zeros(8)
    storage = torch.zeros(C)
    weight = torch.as_strided(storage, (C,), (1,))
    storage.untyped_storage().resize_(small.untyped_storage().nbytes())
    with pytest.raises(BatchNormError, match="the memory of weight"):
        batch_norm(x, None, None, weight, training=True)


@pytest.mark.parametrize("how", FREED)
def test_masks_and_moments(path, how):
    x, mask = torch.randn(8, C, 16), torch.ones(8, 16, dtype=torch.bool)
    FREED[how](mask.untyped_storage())
    with pytest.raises(BatchNormError, match="the memory of mask"):
        batch_norm(x, None, None, training=True, mask=mask)
    with pytest.raises(BatchNormError, match="the memory of mask"):
        moments(x, mask=mask)
    FREED[how](x.untyped_storage())
    with pytest.raises(BatchNormError, match="the memory of the input"):
        moments(x)
    with pytest.raises(BatchNormError, match="the memory of the input"):
        batch_norm(x, None, None, training=True, groups=2)


@pytest.mark.parametrize("how", ["freed", "one byte short"])
@pytest.mark.parametrize("name", ["weight", "running_mean", "running_var", "num_batches_tracked"])
def test_a_layer_without_its_memory(path, name, how):
    layer = bn.BatchNorm2d(C)
    FREED[how](getattr(layer, name).detach().untyped_storage())
    with pytest.raises(BatchNormError, match=f"the memory of {name} was freed"):
        layer(torch.randn(8, C, 4, 4))


@pytest.fixture(params=["native", "python"])
def own(request, monkeypatch):
    """The two ways whose backward pass is ours."""
    if kernels.kernel() is None or call.compiled is None:
        pytest.skip(kernels.describe())
    if request.param == "python":
        monkeypatch.setattr(call, "compiled", None)


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["x", "residual", "dy"])
def test_what_is_freed_between_forward_and_backward_is_named(own, name, training, how):
    tensors = {**given(), "dy": torch.randn(8, C, 4, 4)}
    dy = tensors.pop("dy")
    x = tensors["x"].clone().requires_grad_()
    y = batch_norm(**{**tensors, "x": x}, training=training, activation="silu")  # which reads the residual again
    freed = {"x": x.detach(), "residual": tensors["residual"], "dy": dy}[name]
    FREED[how](freed.untyped_storage())
    words = {
        "x": "the input saved for the backward",
        "residual": "the residual saved for the",
        "dy": "the output's grad",
    }
    with pytest.raises(BatchNormError, match=f"the memory of {words[name]}"):
        y.backward(dy)


def test_a_weight_may_be_freed_between_and_comes_back_for_a_second_derivative(own):
    """As sharded training does it: our backward pass has what it needs of the weight; the second derivative has not."""
    x, weight = torch.randn(8, C, requires_grad=True), torch.rand(C).requires_grad_()
    expected = torch.autograd.grad(batch_norm(x, None, None, weight, training=True).square().sum(), (x, weight))
    y = batch_norm(x, None, None, weight, training=True).square().sum()
    kept = weight.detach().clone()
    storage = weight.detach().untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    found = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(BatchNormError, match="the memory of weight was freed"):
        torch.autograd.grad(y, x, create_graph=True)
    storage.resize_(nbytes)
    weight.data.copy_(kept)  # which autograd does not count as a change
    torch.autograd.grad(y, x, create_graph=True)[0].square().sum().backward()
    assert x.grad is not None


CRASH = """
import torch
from batchnorm.functional import batch_norm
x = torch.randn(64, 256, 14, 14, requires_grad=True)
mean, var = torch.zeros(256), torch.ones(256)
if {when!r} == "before":
    mean.untyped_storage().resize_(0)
y = batch_norm(x, mean, var, training=True)
x.detach().untyped_storage().resize_(0)
y.sum().backward()
"""


@pytest.mark.parametrize(
    ("when", "way"),
    [("before", {}), ("between", {"BATCHNORM_CALL": "python"}), ("before", {"BATCHNORM_KERNEL": "torch"})],
    ids=["c", "python", "torch"],
)
def test_the_process_survives(when, way):
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(when=when)],
        env={**os.environ, **way},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, (done.returncode, done.stderr[-300:])  # -11: a segmentation fault
    assert "BatchNormError: " in done.stderr
    assert " was freed: its shape " in done.stderr


def test_tensors_that_have_no_storage_of_their_own_still_pass(path):
    x = torch.randn(8, C)
    zero = torch._efficientzerotensor((C,))
    assert torch.allclose(
        batch_norm(x, None, None, None, zero, training=True), batch_norm(x, None, None, training=True), atol=1e-6
    )
    assert batch_norm(x.to("meta"), None, None, training=True).is_meta
    assert torch.func.vmap(lambda x: batch_norm(x, None, None, training=True))(torch.randn(2, 8, C)).shape == (2, 8, C)


BRICKS = {
    "renorm": lambda: bn.BatchRenorm(C),
    **{name: lambda name=name: bn.make_norm(name, C, 2) for name in ("rms", "dyt", "filter-response")},
    **{name: lambda name=name: bn.make_norm(name, C, 2, activation="relu") for name in ("group", "instance", "layer")},
}


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("brick", BRICKS)
def test_bricks_name_what_lost_its_memory(brick, how):
    """Elementary operations end the process here, or read what lies behind."""
    for name in [*dict(BRICKS[brick]().named_parameters()), "running_mean", "running_var", "the input", "the residual"]:
        layer, x, residual = BRICKS[brick](), torch.randn(8, C, 4, 4), torch.randn(8, C, 4, 4)
        held = {
            **dict(layer.named_parameters()),
            **dict(layer.named_buffers()),
            "the input": x,
            "the residual": residual,
        }
        if name not in held:
            continue
        FREED[how](held[name].untyped_storage())
        with pytest.raises(BatchNormError, match=f"the memory of {name} was freed"):
            layer(x, residual)


@pytest.mark.parametrize("brick", BRICKS)
def test_bricks_name_what_is_no_tensor(brick):
    x = torch.randn(8, C, 4, 4)
    with pytest.raises(BatchNormError, match=r"the residual is a str; give a torch.Tensor, or None"):
        BRICKS[brick]()(x, "x")
    with pytest.raises(BatchNormError, match="the input is a NoneType"):
        BRICKS[brick]()(None)


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cls", [bn.BatchNormLSTM, bn.BatchNormGRU, bn.BatchNormLSTMCell, bn.BatchNormGRUCell])
def test_a_recurrent_layer_without_its_memory(cls, training, how):
    layer = cls(8, C)
    x = torch.randn((4, 8) if "Cell" in cls.__name__ else (3, 4, 8))
    for name in [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]:
        broken = copy.deepcopy(layer).train(training)
        held = dict([*broken.named_parameters(), *broken.named_buffers()])[name]
        FREED[how](held.detach().untyped_storage())
        with pytest.raises(BatchNormError, match=f"the memory of {name} was freed"):
            broken(x)
