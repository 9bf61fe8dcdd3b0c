"""Gradients of gradients: exact in float64, and on the kernel's path as good as float32 can be."""

import itertools

import pytest
import torch
from layer_cases import ACTIVATIONS, activate, example
from torch.func import functional_call

import batchnorm as bn
from batchnorm.kernels import fallback

MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
SHAPE = (6, 20, 3, 4)


def parts(dtype=torch.float32, last=False, seed=0):
    """x, weight, bias, residual as leaves, and the running statistics; the same numbers in every dtype."""
    torch.manual_seed(seed)
    x, residual = example(2, shape=SHAPE, last=last), torch.randn(SHAPE)
    weight, bias, mean, var = torch.rand(20) + 0.5, torch.randn(20), torch.randn(20), torch.rand(20) + 0.5
    leaves = [t.to(dtype, memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, bias, residual)]
    return leaves, (mean.to(dtype), var.to(dtype))


def by_definition(leaves, statistics, training, activation, residual):
    x, weight, bias, r = leaves
    axes, shape = (0, 2, 3), (1, -1, 1, 1)
    if training:
        mean, var = x.mean(axes), x.var(axes, correction=0)
    else:
        mean, var = statistics
    z = (x - mean.reshape(shape)) / (var.reshape(shape) + 1e-5).sqrt() * weight.reshape(shape) + bias.reshape(shape)
    return activate(z + r if residual else z, activation, 0.2)


def by_layer(leaves, statistics, training, activation, residual):
    x, weight, bias, r = leaves
    layer = bn.BatchNorm2d(20, activation=activation, negative_slope=0.2, update=False, dtype=x.dtype).train(training)
    state = {"weight": weight, "bias": bias, "running_mean": statistics[0], "running_var": statistics[1]}
    return functional_call(layer, state, (x, r if residual else None))


def penalties(run, leaves, statistics, *setting):
    """A gradient penalty: the norm of the gradient of a loss, and its gradient with respect to everything."""
    y = run(leaves, statistics, *setting)
    torch.manual_seed(1)
    direction = torch.randn(SHAPE).to(y.dtype)
    used = leaves if setting[-1] else leaves[:3]
    first = torch.autograd.grad((y * direction).sum() + y.pow(3).mean(), used, create_graph=True)
    norm = sum(g.pow(2).sum() for g in first)
    second = torch.autograd.grad(norm, used, allow_unused=True)
    return [*first, *(torch.zeros_like(t) if g is None else g for g, t in zip(second, used, strict=True))]


def near(actual, expected, tolerance=2e-4):
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * max(largest, 1e-3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@MODES
def test_gradient_penalty_in_float32(activation, residual, last, training, path):
    setting = (training, activation, residual)
    actual = penalties(by_layer, *parts(last=last), *setting)
    expected = penalties(by_definition, *parts(torch.float64), *setting)
    assert len(actual) == len(expected) == (8 if residual else 6)
    for a, e in zip(actual, expected, strict=True):
        near(a, e)


def test_the_forward_pass_of_a_penalty_is_native(kernel_calls):
    penalties(by_layer, *parts(), True, "silu", True)
    # The gradients with a graph are torch's; the last pass, which needs none, ends in the kernel again.
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@MODES
def test_the_input_as_its_own_residual(activation, training, path):
    def run(by, dtype):
        (x, weight, bias, _), statistics = parts(dtype)
        y = by([x, weight, bias, x], statistics, training, activation, True)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.pow(2).sum(), (x, weight, bias))

    for a, e in zip(run(by_layer, torch.float32), run(by_definition, torch.float64), strict=True):
        near(a, e)


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_create_graph_with_part_of_the_inputs(wanted, activation, path):
    def run(by, dtype):
        leaves, statistics = parts(dtype)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in wanted)
        y = by(leaves, statistics, True, activation, True)
        used = [leaves[i] for i in wanted]
        first = torch.autograd.grad(y.pow(3).sum(), used, create_graph=True)
        assert all(g.shape == t.shape for g, t in zip(first, used, strict=True))
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), used)
        return *first, *second

    for a, e in zip(run(by_layer, torch.float32), run(by_definition, torch.float64), strict=True):
        near(a, e)


@MODES
@pytest.mark.parametrize("path", ["native"], indirect=True)
def test_third_derivative(training, path):
    # Not on torch's path: in training, torch's own operator has a wrong third derivative.
    def run(by, dtype):
        leaves, statistics = parts(dtype)
        value = by(leaves, statistics, training, "silu", True).pow(2).sum()
        results = []
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            results.extend(grads)
            value = sum(g.pow(2).sum() for g in grads) / 100
        return results

    for a, e in zip(run(by_layer, torch.float32), run(by_definition, torch.float64), strict=True):
        near(a, e, 2e-3)


def test_a_frozen_gradient_of_the_gradient(path):
    """create_graph while the cotangent itself is differentiated: the derivative with respect to dy."""
    leaves, statistics = parts()
    y = by_layer(leaves, statistics, True, "relu", True)
    dy = torch.randn(SHAPE, requires_grad=True)
    (dx,) = torch.autograd.grad(y, leaves[0], dy, create_graph=True)
    v = torch.randn(SHAPE)
    (jvp,) = torch.autograd.grad(dx, dy, v)

    exact, exact_statistics = parts(torch.float64)
    _, expected = torch.func.jvp(
        lambda x: by_definition([x, *exact[1:]], exact_statistics, True, "relu", True), (exact[0],), (v.double(),)
    )
    near(jvp, expected.detach())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@MODES
def test_gradcheck_in_float64(activation, residual, training):
    leaves, statistics = parts(torch.float64)
    leaves = leaves if residual else leaves[:3]

    def call(*leaves):
        leaves = leaves if residual else (*leaves, None)
        return by_layer(leaves, statistics, training, activation, residual)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("training", [True, False])
def test_the_composite_is_the_definition(training):
    (x, weight, bias, r), statistics = parts(torch.float64)
    for activation, residual in itertools.product(ACTIVATIONS, (None, r)):
        given = (None, None) if training else statistics
        actual = fallback.composite(x, *given, weight, bias, 1e-5, activation, residual, 0.2)
        expected = by_definition((x, weight, bias, r), statistics, training, activation, residual is not None)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_input(path):
    """The gradient's gradient is as good as its dtype."""
    (x, weight, bias, _), _ = parts()
    narrow = x.detach().bfloat16().requires_grad_()

    def run(by, x, weight, bias):
        y = by([x, weight, bias, None], (None, None), True, "none", False)
        (first,) = torch.autograd.grad(y.to(weight.dtype).pow(3).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.to(weight.dtype).pow(2).sum(), weight)

    layer = bn.BatchNorm2d(20, update=False)
    state = {"weight": weight, "bias": bias}
    actual = run(lambda leaves, *_: functional_call(layer, state, (leaves[0],)), narrow, weight, bias)
    assert actual[0].dtype == torch.bfloat16
    exact = [t.detach().double().requires_grad_() for t in (narrow, weight, bias)]
    for a, e in zip(actual, run(by_definition, *exact), strict=True):
        near(a, e, 0.03)
