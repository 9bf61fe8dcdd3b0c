"""Layers train and evaluate as torch's, step for step."""

import pytest
import torch
from layer_cases import ACTIVATIONS, OURS, SHAPES, activate, example, pair, same, same_buffers, same_steps, step
from torch import nn

import batchnorm as bn
from batchnorm.transforms.synchronise import synchronised

DIMS = pytest.mark.parametrize("dims", [1, 2, 3])
ARGUMENTS = pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
    ],
    ids=["default", "no_affine", "no_bias", "no_tracking", "cumulative", "momentum"],
)


@DIMS
@ARGUMENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_training_then_evaluation_follows_torch(dims, arguments, dtype, path):
    stock, ours = pair(dims, **arguments)
    if dtype == torch.float64:
        stock.double(), ours.double()
    for _ in range(3):
        x = example(dims, dtype)
        same_steps(stock, ours, x, torch.randn_like(x))
    same_steps(stock.eval(), ours.eval(), x, torch.randn_like(x))
    same_steps(stock.train(), ours.train(), x, torch.randn_like(x))


@DIMS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_fused_neighbours_equal_separate_ones(dims, activation, with_residual, mode, path):
    stock, ours = pair(dims)
    ours.activation, ours.negative_slope = activation, 0.2
    x, residual = example(dims), torch.randn(SHAPES[dims], requires_grad=True)
    dy = torch.randn_like(x)
    stock.train(mode), ours.train(mode)
    if with_residual:
        expected = step(
            lambda x: activate(stock(x) + residual, activation, 0.2), x, dy, [*stock.parameters(), residual]
        )
        actual = step(lambda x: ours(x, residual=residual), x, dy, [*ours.parameters(), residual])
    else:
        expected = step(lambda x: activate(stock(x), activation, 0.2), x, dy, stock.parameters())
        actual = step(ours, x, dy, ours.parameters())
    for a, e in zip(actual, expected, strict=True):
        same(a, e)
    same_buffers(ours, stock)


def test_residual_is_also_the_second_positional_argument(path):
    layer, x = bn.BatchNorm1d(24, update=False), example(1)
    assert torch.equal(layer(x, x), layer(x, residual=x))


@pytest.mark.parametrize("slope", [0.0, 1.5, -0.5])
def test_unusual_slopes_of_leaky_relu(slope, path):
    stock, ours = pair(1)
    ours.activation, ours.negative_slope = "leaky_relu", slope
    x = example(1)
    dy = torch.randn_like(x)
    expected = step(lambda x: activate(stock(x), "leaky_relu", slope), x, dy, stock.parameters())
    for a, e in zip(step(ours, x, dy, ours.parameters()), expected, strict=True):
        same(a, e)


@DIMS
def test_momentum_none_is_the_average_of_all_batches(dims, path):
    layer = OURS[dims](24, momentum=None)
    batches = [example(dims) for _ in range(4)]
    for x in batches:
        layer(x)
    means = torch.stack([x.double().transpose(0, 1).flatten(1).mean(1) for x in batches]).mean(0)
    variances = torch.stack([x.double().transpose(0, 1).flatten(1).var(1) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean.double(), means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), variances, rtol=1e-5, atol=1e-6)
    assert int(layer.num_batches_tracked) == 4


COUNTERS = {
    "int64": torch.tensor(3),
    "int32": torch.tensor(3, dtype=torch.int32),
    "float": torch.tensor(3.0),
    "one element": torch.tensor([3]),
    "two elements": torch.tensor([3, 3]),
    "every other": torch.tensor([3, 0, 3, 0])[::2],
}


@pytest.mark.parametrize("name", COUNTERS)
def test_any_counter_counts_the_updates_and_tells_autograd_that_it_changed(name, path):
    layer, counter = bn.BatchNorm1d(24), COUNTERS[name].clone()
    layer.num_batches_tracked = counter
    version = counter._version
    for times in (1, 2):
        layer(example(1))
        assert layer.num_batches_tracked is counter
        assert (counter == 3 + times).all()
        assert counter._version == version + times
    layer.eval()(example(1))
    layer.train().update = False
    layer(example(1))
    assert (counter == 5).all()
    assert counter._version == version + 2


class Counting(nn.BatchNorm1d):
    """A forward of its own, which counts for itself."""

    def forward(self, x):
        self.num_batches_tracked.add_(10)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def test_a_layer_that_counts_for_itself_is_not_counted_for(path):
    layer = Counting(24)
    layer.__class__ = synchronised(Counting)
    layer(example(1))
    assert int(layer.num_batches_tracked) == 10
    assert float(layer.running_mean.abs().max()) > 0


def test_momentum_none_without_a_counter_is_torchs(path):
    stock, ours = pair(2, momentum=None)
    stock.num_batches_tracked = ours.num_batches_tracked = None
    x = example(2)
    same_steps(stock, ours, x, torch.randn_like(x))


@DIMS
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("arguments", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_empty_batches(dims, mode, arguments, path):
    stock, ours = pair(dims, **arguments)
    x = torch.empty(0, *SHAPES[dims][1:])
    same_steps(stock.train(mode), ours.train(mode), x, torch.empty_like(x))


@pytest.mark.parametrize("shape", [(2, 24), (1, 24, 2), (3, 1), (2, 7), (64, 16), (1, 3, 40)], ids=str)
def test_small_batches(shape, path):
    stock, ours = pair(1, shape[1], eps=0.1)  # with a small eps, the gradient of two values is all cancellation
    x = example(1, shape=shape) * 3
    same_steps(stock, ours, x, torch.randn_like(x))
    same_steps(stock.eval(), ours.eval(), x[:1], torch.randn_like(x[:1]))


@DIMS
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimiser_moves_the_parameters_as_torchs(dims, optimiser, path):
    stock, ours = pair(dims)
    x, target = example(dims), torch.randn(SHAPES[dims])
    for layer in (stock, ours):
        steps = optimiser(layer.parameters(), lr=0.05)
        for _ in range(5):
            steps.zero_grad()
            (layer(x) - target).square().mean().backward()
            steps.step()
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        assert not torch.equal(theirs, torch.ones_like(theirs))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
