"""Strides and views that torch's own kernels or ours have misread: gradients against the definition in float64."""

import itertools

import pytest
import torch

import batchnorm as bn
from batchnorm.functional import batch_norm, moments

MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def definition(x, mean, var, weight, bias, residual, training, activation):
    """The family's formula, in elementary operations."""
    shape, axes = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    if training:
        mean, var = x.mean(axes), x.var(axes, correction=0)
    y = (x - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
    y = y if weight is None else y * weight.view(shape) + bias.view(shape)
    y = y if residual is None else y + residual
    return y.relu() if activation == "relu" else y


def plain(tensor):
    """The numbers of a tensor in float64, without gaps and without a negative bit."""
    return None if tensor is None else (tensor * 1.0).double().contiguous().clone()


def compare(x, mean, var, weight, bias, residual, dy, training, activation=None):
    """Outputs, gradients and updated statistics, against the definition."""

    def step(function, tensors, g):
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], g))

    found = step(
        lambda x, w, b, r: batch_norm(x, mean, var, w, b, training, activation=activation, residual=r),
        (x, weight, bias, residual),
        dy,
    )
    m, v = plain(mean), plain(var)
    expected = step(
        lambda x, w, b, r: definition(x, m, v, w, b, r, training, activation),
        [plain(t) for t in (x, weight, bias, residual)],
        plain(dy),
    )
    for name, a, b in zip(("y", "dx", "dweight", "dbias", "dresidual"), found, expected, strict=False):
        scale = b.abs().max().item() + 1
        assert torch.allclose(a.double(), b, rtol=0, atol=(1e-9 if x.dtype is torch.float64 else 1e-4) * scale), name


def statistics(channels, dtype):
    return torch.randn(channels).to(dtype), torch.rand(channels).to(dtype) + 0.5


def strided(row):
    """The same numbers, between others."""
    return torch.stack([row, torch.full_like(row, 99.0)], 1)[:, 0]


def negative(tensor):
    """The same numbers, as a view that negates what memory holds."""
    return torch._neg_view(-tensor)


def permutations(x):
    for order in itertools.permutations(range(x.dim())):
        yield x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


SHAPES = [
    (8, 6),
    (8, 32),
    (8, 6, 1),
    (1, 6, 20),
    (1, 6, 5, 5),
    (2, 20, 5, 1),
    (8, 32, 1, 1),
    (4, 1, 3, 3),
    (1, 5, 2, 3, 4),
]


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permuted_inputs_with_strided_parameters(path, shape, dtype, training):
    channels = shape[1]
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(channels).to(dtype), torch.randn(channels).to(dtype)
    orders = list(permutations(x))
    for permuted in orders if len(orders) <= 24 else orders[::9]:
        mean, var = statistics(channels, dtype)
        compare(permuted, mean.clone(), var.clone(), weight, bias, None, dy, training)
        compare(permuted, strided(mean), strided(var), strided(weight), strided(bias), None, dy, training)
        compare(permuted, mean, var, weight[:1].expand(channels), bias[:1].expand(channels), None, dy, training)


@MODES
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 4, 8, 1), (2, 4, 1, 8), (1, 4, 8, 1), (3, 1, 4, 2), (2, 3, 4, 1, 1), (8, 6)], ids=str
)
def test_permuted_gradients_of_the_output(path, shape, dtype, activation, training):
    """A spectrogram whose frequencies become channels, and go back: its gradient comes permuted."""
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)
    mean, var = statistics(shape[1], dtype)
    orders = list(permutations(dy))
    for permuted in orders if len(orders) <= 24 else orders[::5]:
        for given in (x, *orders[1::7]):
            compare(given, mean.clone(), var.clone(), weight, bias, None, permuted, training, activation)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_permuted_gradients_under_function_transforms(kind):
    layer = bn.BatchNorm2d(4, track_running_stats=False).to(kind)

    def loss(x):
        return (layer(x).transpose(1, 3) * torch.arange(64.0).view(2, 1, 8, 4).to(kind)).sum()

    x = torch.randn(2, 4, 8, 1).to(kind)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x[None])[0], expected)


@MODES
@pytest.mark.parametrize("name", ["x", "mean", "var", "weight", "bias", "residual", "dy"])
@pytest.mark.parametrize("shape", [(16, 32), (4, 24, 5, 5), (8, 3)], ids=str)
def test_negative_views(path, shape, name, training):
    channels = shape[1]
    mean, var = statistics(channels, torch.float32)
    given = {name: torch.randn(shape) for name in ("x", "residual", "dy")}
    given |= {"mean": mean, "var": var, "weight": torch.randn(channels), "bias": torch.randn(channels)}
    given[name] = negative(given[name])
    assert given[name].is_neg()
    compare(**given, training=training, activation="relu")


def test_the_imaginary_part_of_a_conjugate(path):
    """The negative view that programs make without asking for one."""
    z = torch.randn(8, 32, 4, 4, dtype=torch.complex64)
    row = torch.randn(32, dtype=torch.complex64)
    x, weight = z.conj().imag, row.conj().imag
    assert x.is_neg()
    compare(x, None, None, weight, weight, x, torch.randn_like(z.real), True, "relu")
    found = moments(x)
    assert torch.allclose(found.mean, (-z.imag).double().mean((0, 2, 3)), atol=1e-6)
    mask = torch.ones(8, 4, 4, dtype=torch.bool)
    assert torch.allclose(
        batch_norm(x, None, None, training=True, mask=mask),
        torch.nn.functional.batch_norm(-z.imag, None, None, training=True),
        atol=1e-5,
    )


@pytest.mark.parametrize("both", [True, False])
def test_negative_views_as_running_statistics_are_updated(path, both):
    x = torch.randn(16, 32) + 3
    mean, var = torch.zeros(32), torch.ones(32)
    batch_norm(x, mean, var, training=True)
    low, high = torch.zeros(32), -torch.ones(32)
    batch_norm(x, torch._neg_view(low), torch._neg_view(high) if both else torch.ones(32), training=True)
    assert torch.allclose(-low, mean, atol=1e-6)
    if both:
        assert torch.allclose(-high, var, atol=1e-6)


def test_a_hook_may_give_back_negative_views(path):
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)

    def step():
        return torch.autograd.grad(batch_norm(x, None, None, training=True, activation="relu"), x, dy)[0]

    expected = step()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: negative(t.detach()) if t.is_floating_point() else t
    ):
        assert torch.allclose(step(), expected, atol=1e-6)


def test_a_layer_with_a_strided_weight_learns_as_its_copy_does(path):
    """torch 2.13 was wrong by 23 here, in evaluation."""
    rows = torch.randn(6, 2) * 10
    layer, copy = bn.BatchNorm1d(6).eval(), bn.BatchNorm1d(6).eval()
    layer.weight, copy.weight = torch.nn.Parameter(rows[:, 0]), torch.nn.Parameter(rows[:, 0].clone())
    assert layer.weight.stride() == (2,)
    x, dy = torch.randn(4, 6), torch.randn(4, 6)
    found, expected = (
        torch.autograd.grad(norm(leaf), (leaf, norm.weight, norm.bias), dy)
        for norm, leaf in ((layer, x.clone().requires_grad_()), (copy, x.clone().requires_grad_()))
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@MODES
def test_instance_norm_with_an_activation_and_permuted_gradients(training):
    layer, x, dy = bn.make_norm("instance", 6, 2, activation="silu"), torch.randn(1, 6, 5, 3), torch.randn(1, 6, 5, 3)
    layer.train(training)
    expected = None
    for permuted in permutations(dy):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(layer(leaf), leaf, permuted)
        expected = found if expected is None else expected
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", ["batch", "instance", "group", "layer", "rms", "filter-response", "dyt", "renorm"])
@pytest.mark.parametrize("shape", [(1, 6, 5, 5), (1, 6, 5, 1), (1, 6, 2, 3, 4), (2, 6, 1, 5)], ids=str)
def test_every_brick_reads_permuted_gradients(name, shape, activation):
    layer = bn.make_norm(name, 6, dims=len(shape) - 2, activation=activation)
    x, dy = torch.randn(shape), torch.randn(shape)
    leaves = [x.requires_grad_(), *layer.parameters()]
    expected = torch.autograd.grad(layer(x), leaves, dy)
    orders = list(permutations(dy))
    for permuted in orders if len(orders) <= 24 else orders[::7]:
        for found, wanted in zip(torch.autograd.grad(layer(x), leaves, permuted), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["weight", "bias", "both"])
def test_zeros_without_memory(name, training):
    """torch's own backward pass reads the memory of such a weight, which it does not have (torch 2.13)."""
    torch.manual_seed(0)
    gradients = []
    for make in (torch.zeros, lambda size: torch._efficientzerotensor((size,))):
        x = torch.arange(48.0).view(8, 6).sin().requires_grad_()
        weight, bias = (make(6) if name in (each, "both") else torch.ones(6) for each in ("weight", "bias"))
        rows = weight.requires_grad_(), bias.requires_grad_()
        y = bn.functional.batch_norm(x, torch.zeros(6), torch.ones(6), *rows, training=training)
        for _ in range(20):
            torch.full((8, 6), 7e7)  # memory that is given back, and found by what is not initialised
        y.backward(torch.ones(8, 6).cumsum(0))
        gradients.append((x.grad, *(row.grad for row in rows)))
    for expected, found in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
