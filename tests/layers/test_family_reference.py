"""Each brick against the reference, in float64, gradients too."""

from functools import partial

import numpy as np
import pytest
import torch
from family_cases import POSITIONS
from torch import nn

import batchnorm as bn
from batchnorm import reference
from batchnorm.layers import channel_norms

STATISTICAL = pytest.mark.parametrize("name", ["batch", "group", "layer", "instance", "rms"])
DIMS = pytest.mark.parametrize("dims", [0, 1, 2, 3])


@STATISTICAL
@DIMS
@pytest.mark.parametrize("activation", [None, "relu"])
def test_reference(name, dims, activation):
    """Output and every gradient, in float64."""
    if name == "instance" and dims == 0:
        return
    x = torch.randn(6, 12, *POSITIONS[dims], dtype=torch.float64) * 2 + 1
    layer = bn.make_norm(name, 12, dims, eps=1e-3, activation=activation).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 2.0)
    gamma = layer.weight.detach().numpy()
    beta = None if name == "rms" else layer.bias.detach().numpy()
    groups = layer.num_groups if name == "group" else None
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [leaf, *layer.parameters()], dy)
    expected = reference.normalize(x.numpy(), name, gamma, beta, 1e-3, groups=groups).y
    dz = dy.numpy()
    if activation:
        dz, expected = dz * (expected > 0), np.maximum(expected, 0)
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-10, atol=1e-10)
    wanted = reference.normalize_backward(dz, x.numpy(), name, gamma, beta, 1e-3, groups=groups)
    for actual, e in zip(gradients, (wanted.dx, wanted.dgamma, wanted.dbeta), strict=False):
        np.testing.assert_allclose(actual.numpy(), e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "before",
    [
        partial(nn.Linear, 5, 8),
        partial(nn.Conv2d, 4, 8, 3),
        partial(nn.Conv2d, 4, 8, 3, groups=2),
        partial(nn.ConvTranspose2d, 4, 8, 3),
    ],
    ids=["linear", "conv", "grouped", "transposed"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_weight_norm_is_the_reference(before, bias):
    layer = before(bias=bias).double()
    w = layer.weight.detach().clone()
    x = torch.randn(3, 5, dtype=torch.float64) if w.dim() == 2 else torch.randn(3, 4, 6, 6, dtype=torch.float64)
    y = layer(x)
    after = bn.make_norm("weight", 8, of=layer)
    torch.testing.assert_close(after(layer(x)), y)  # it starts as the function that it was
    assert isinstance(after, nn.Identity) == bias  # else there is a bias to learn, in the layer's own precision
    assert [p.dtype for p in after.parameters()] == [torch.float64] * (not bias)
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    with torch.no_grad():
        g.uniform_(1.0, 2.0)
        v.mul_(3.0)
    axes = (0, 2, 3) if isinstance(layer, nn.ConvTranspose2d) else None
    assert g.numel() == 8
    expected = reference.weight_norm(v.detach().numpy(), g.detach().numpy().ravel(), axes)
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, rtol=1e-12)
    dw = torch.randn_like(w)
    dg, dv = torch.autograd.grad(layer.weight, [g, v], dw)
    wanted_v, wanted_g = reference.weight_norm_backward(
        dw.numpy(), v.detach().numpy(), g.detach().numpy().ravel(), axes
    )
    np.testing.assert_allclose(dv.numpy(), wanted_v, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dg.numpy().ravel(), wanted_g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["group", "layer", "instance", "rms"])
@pytest.mark.parametrize("layer_dims", [2, None])
def test_second_derivatives(name, layer_dims):
    layer = bn.make_norm(name, 4, layer_dims, activation="silu").double()
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_rms_is_torchs_on_rows():
    x = torch.randn(5, 8)
    torch.testing.assert_close(channel_norms.RMSNorm(8)(x), nn.RMSNorm(8, eps=1e-5)(x))


def test_zeros_have_a_gradient():
    x = torch.zeros(2, 3, 4, requires_grad=True)
    channel_norms.RMSNorm(3)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3, 4), 1e-5**-0.5))
