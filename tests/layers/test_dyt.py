"""DyT: its formula and derivatives in float64 NumPy, both layouts, and where the channel may stand."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn


def formula(x, gamma, beta, alpha, axis):
    shape = [1] * x.ndim
    shape[axis] = -1
    return gamma.reshape(shape) * np.tanh(alpha * x) + beta.reshape(shape)


def randomised(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.3, 1.5)
    return layer


@pytest.mark.parametrize(("shape", "axis"), [((5, 6), 1), ((4, 6, 3), 1), ((4, 6, 3, 2), 1), ((4, 7, 6), -1)])
def test_formula_and_gradients(shape, axis):
    layer = randomised(bn.DyT(6, channel_axis=axis).double())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    gamma, beta, alpha = (p.detach().numpy() for p in (layer.weight, layer.bias, layer.alpha))
    n = x.detach().numpy()
    np.testing.assert_allclose(y.detach().numpy(), formula(n, gamma, beta, alpha, axis), rtol=1e-13)
    dy = torch.randn_like(y)
    dx, dgamma, dbeta, dalpha = torch.autograd.grad(y, [x, layer.weight, layer.bias, layer.alpha], dy)
    others = tuple(a for a in range(n.ndim) if a != axis % n.ndim)
    shape_ = [1] * n.ndim
    shape_[axis] = -1
    inner = dy.numpy() * gamma.reshape(shape_) * (1 - np.tanh(alpha * n) ** 2)
    np.testing.assert_allclose(dx.numpy(), inner * alpha, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(dgamma.numpy(), (dy.numpy() * np.tanh(alpha * n)).sum(others), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dbeta.numpy(), dy.numpy().sum(others), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dalpha.numpy(), [(inner * n).sum()], rtol=1e-10)


def test_it_starts_as_the_paper_has_it():
    layer = bn.DyT(3)
    assert layer.alpha.tolist() == [0.5]
    x = torch.randn(4, 3, 2)
    torch.testing.assert_close(layer(x), torch.tanh(0.5 * x))
    assert [(key, tuple(p.shape)) for key, p in layer.named_parameters()] == [
        ("weight", (3,)), ("bias", (3,)), ("alpha", (1,)),
    ]  # fmt: skip
    assert not list(layer.buffers())


def test_nothing_depends_on_the_batch_or_the_mode():
    layer = randomised(bn.DyT(3, activation="relu"))
    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))
    assert torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_with_float32_parameters(dtype):
    layer = randomised(bn.DyT(8))
    x = torch.randn(4, 8, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    y = layer(x)
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    assert torch.equal(y, layer(x.float()).to(dtype))  # rounded once, at the end


def test_copies_options_and_mistakes():
    layer = randomised(bn.DyT(4, alpha_start=0.2, activation="silu", channel_axis=-1))
    x = torch.randn(2, 3, 4)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert repr(layer) == "DyT(4, alpha_start=0.2, channel_axis=-1, activation='silu')"
    assert repr(bn.DyT(4)) == "DyT(4, alpha_start=0.5)"
    assert bn.DyT(4, affine=False).weight is bn.DyT(4, affine=False).bias is None
    with pytest.raises(
        bn.BatchNormError, match=r"DyT: expected 4 channels at axis 1, got an input of shape \[2, 3, 4\]"
    ):
        bn.DyT(4)(x)
    with pytest.raises(bn.BatchNormError, match=r"at axis 3"):
        bn.DyT(4, channel_axis=3)(x)
    with pytest.raises(bn.BatchNormError, match="DyT: activation is 'tanh'; use one of"):
        bn.DyT(4, activation="tanh")
    layer.reset_parameters()
    assert (layer.alpha.item(), layer.weight.sum().item()) == (pytest.approx(0.2), 4.0)


def test_meta_device_and_dtype():
    layer = bn.DyT(4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    torch.testing.assert_close(layer(torch.ones(1, 4).bfloat16()), torch.full((1, 4), 0.5).tanh().bfloat16())


def test_is_a_module_of_torch():
    assert isinstance(bn.DyT(2), nn.Module)
    assert torch.autograd.gradgradcheck(
        bn.DyT(2).double(), (torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_(),)
    )
