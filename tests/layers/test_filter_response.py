"""Filter response norm: against the reference's formula in float64, its threshold, and the case of one position."""

import copy
import pickle

import numpy as np
import pytest
import torch

import batchnorm as bn
from batchnorm import reference


def randomised(layer):
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.uniform_(-0.5, 0.5) if name in ("tau", "bias") else parameter.uniform_(0.5, 1.5)
    return layer


def expected(x, dy, gamma, beta, tau, eps):
    """Output and gradients by the family's one formula: mean squares over the positions, then the threshold."""
    axes = tuple(range(2, x.ndim))
    across = (1, -1, *[1] * (x.ndim - 2))
    mu, var = reference.moments(x, axes, center=False)
    xhat = reference.standardize(x, mu, var, eps)
    z = gamma.reshape(across) * xhat + beta.reshape(across)
    y = z if tau is None else np.maximum(z, tau.reshape(across))
    passed = np.ones_like(z) if tau is None else z > tau.reshape(across)
    dz = dy * passed
    others = (0, *axes)
    dx = reference.standardize_backward(
        dz * gamma.reshape(across), x, mu, var, eps, axes, center=False, fixed=False
    )  # fmt: skip
    return y, dx, (dz * xhat).sum(others), dz.sum(others), (dy * (1 - passed)).sum(others)


@pytest.mark.parametrize("shape", [(3, 4, 7), (3, 4, 5, 6), (2, 4, 2, 3, 4)])
@pytest.mark.parametrize("threshold", [True, False])
@pytest.mark.parametrize("learn_eps", [True, False])
def test_reference(shape, threshold, learn_eps):
    layer = randomised(bn.FilterResponseNorm(4, eps=1e-3, threshold=threshold, learn_eps=learn_eps).double())
    x = (torch.randn(shape, dtype=torch.float64) + 0.5).requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    parameters = [layer.weight, layer.bias, *([layer.tau] if threshold else [])]
    actual = [y, *torch.autograd.grad(y, [x, *parameters], dy)]
    eps = 1e-3 + (abs(layer.learned_eps.item()) if learn_eps else 0.0)
    gamma, beta = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    tau = layer.tau.detach().numpy() if threshold else None
    wanted = expected(x.detach().numpy(), dy.numpy(), gamma, beta, tau, eps)
    for a, e in zip(actual, wanted, strict=False):
        np.testing.assert_allclose(a.detach().numpy(), e, rtol=1e-10, atol=1e-12)


def test_it_starts_as_a_rectifier():
    layer = bn.FilterResponseNorm(4)
    x = torch.randn(2, 4, 5, 5) * 100
    normalised = x / x.square().mean((2, 3), keepdim=True).sqrt()
    torch.testing.assert_close(layer(x), normalised.relu())
    assert [key for key, _ in layer.named_parameters()] == ["weight", "bias", "tau"]
    assert not list(layer.buffers())
    torch.testing.assert_close(layer.train()(x)[:1], layer.eval()(x[:1]))


def test_the_threshold_is_the_activation():
    """It takes a ReLU's place; another activation takes its place."""
    kept = {None: True, "relu": True, "none": False, "silu": False, "leaky_relu": False, "relu6": False}
    for activation, has in kept.items():
        layer = bn.FilterResponseNorm(4, activation=activation)
        assert (layer.tau is not None) == has
    assert bn.FilterResponseNorm(4, activation="relu", threshold=False).tau is None
    x = torch.randn(2, 4, 5)
    low = bn.FilterResponseNorm(4, activation="relu")
    with torch.no_grad():
        low.tau.fill_(-1.0)
    assert low(x).min() == -1.0  # a ReLU behind it would undo what it learned
    both = bn.FilterResponseNorm(4, activation="silu", threshold=True)
    torch.testing.assert_close(both(x), torch.nn.functional.silu(bn.FilterResponseNorm(4)(x)))
    plain = bn.FilterResponseNorm(4, activation="relu", threshold=False)
    assert torch.equal(plain(x), bn.FilterResponseNorm(4, activation="none")(x).relu())


def test_residual_comes_before_the_threshold():
    layer = randomised(bn.FilterResponseNorm(4))
    bare = bn.FilterResponseNorm(4, activation="none")
    bare.load_state_dict(layer.state_dict(), strict=False)
    x, r = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    torch.testing.assert_close(layer(x, residual=r), torch.maximum(bare(x) + r, layer.tau[:, None]))


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 1, 1)])
def test_one_position_needs_a_learned_eps(shape):
    x = torch.randn(shape)
    with pytest.raises(bn.BatchNormError, match=r"one position.*its sign; make the layer with learn_eps=True"):
        bn.FilterResponseNorm(4)(x)
    layer = bn.FilterResponseNorm(4, learn_eps=True, activation="none")
    assert layer.learned_eps.item() == pytest.approx(1e-4)
    torch.testing.assert_close(layer(x), x / (x.square() + 1e-6 + 1e-4).sqrt())
    layer(x).square().sum().backward()
    assert layer.learned_eps.grad.item() < 0  # a larger eps, smaller outputs
    with torch.no_grad():
        layer.learned_eps.fill_(-2.0)  # what was learned counts by its magnitude
    torch.testing.assert_close(layer(x), x / (x.square() + 1e-6 + 2.0).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_with_float32_parameters(dtype):
    layer = randomised(bn.FilterResponseNorm(8))
    x = (torch.randn(4, 8, 3, 3) * 300).to(dtype).contiguous(memory_format=torch.channels_last)  # 300**2 > float16
    y = layer(x)
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    assert torch.equal(y, layer(x.float()).to(dtype))  # rounded once, at the end


def test_copies_options_and_mistakes():
    layer = randomised(bn.FilterResponseNorm(4, learn_eps=True, activation="silu"))
    x = torch.randn(2, 4, 3)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert repr(layer) == "FilterResponseNorm(4, eps=1e-06, learn_eps=True, threshold=False, activation='silu')"
    assert repr(bn.FilterResponseNorm(4, activation="relu")) == "FilterResponseNorm(4, eps=1e-06)"
    free = bn.FilterResponseNorm(4, affine=False)
    assert free.weight is free.bias is None
    with torch.no_grad():
        free.tau.fill_(0.25)
    torch.testing.assert_close(free(x), (x / x.square().mean(2, keepdim=True).sqrt()).clamp(min=0.25))
    with pytest.raises(bn.BatchNormError, match=r"FilterResponseNorm: expected 4 channels at axis 1"):
        layer(x.transpose(1, 2))
    with pytest.raises(bn.BatchNormError, match="use one of"):
        bn.FilterResponseNorm(4, activation="tlu")
    with torch.no_grad():
        layer.learned_eps.fill_(9.0)
    layer.reset_parameters()
    assert layer.learned_eps.item() == pytest.approx(1e-4)


def test_zeros_and_second_derivatives():
    layer = bn.FilterResponseNorm(2, activation="silu").double()
    x = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 0.5 * 1e3))  # silu'(0) / sqrt(eps)
    assert torch.autograd.gradgradcheck(layer, (torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_(),))
