"""What the tests of the layers share: the classes side by side, inputs, and what "the same" means."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn

STOCK = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
OURS = {1: bn.BatchNorm1d, 2: bn.BatchNorm2d, 3: bn.BatchNorm3d}
SHAPES = {1: (16, 24, 5), 2: (6, 24, 5, 7), 3: (4, 24, 2, 3, 5)}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
ACTIVATIONS = ("none", "relu", "relu6", "leaky_relu", "silu")
# Rounding of one operation, times what a sum over a channel and its backward pass may add to it.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}


def activate(z, name, slope=0.01):
    return {
        "none": lambda: z,
        "relu": lambda: F.relu(z),
        "relu6": lambda: F.relu6(z),
        "leaky_relu": lambda: F.leaky_relu(z, slope),
        "silu": lambda: F.silu(z),
    }[name or "none"]()


def randomise(layer):
    """Give a layer parameters and running statistics that no default would produce."""
    with torch.no_grad():
        for tensor, low, high in (
            (layer.weight, 0.5, 2.0),
            (layer.bias, -1.0, 1.0),
            (layer.running_mean, -1.0, 1.0),
            (layer.running_var, 0.5, 2.0),
        ):
            if tensor is not None:
                tensor.uniform_(low, high)
    return layer


def pair(dims, channels=24, **arguments):
    """Torch's layer and ours, made alike, in the same state."""
    stock = randomise(STOCK[dims](channels, **arguments))
    ours = OURS[dims](channels, **arguments)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()), strict=True)
    return stock, ours


def example(dims, dtype=torch.float32, last=False, shape=None):
    """An input whose channels differ in mean and scale."""
    shape = shape or SHAPES[dims]
    per_channel = (1, shape[1], *[1] * (len(shape) - 2))
    x = torch.randn(shape) * torch.rand(per_channel).add(0.5) + torch.randn(per_channel)
    x = x.to(dtype)
    return x.contiguous(memory_format=LAST[dims]) if last else x


def same(actual, expected, tolerance=None):
    """Equal up to rounding, relative to the largest value; dtype and shape exactly."""
    if expected is None:
        assert actual is None
        return
    largest = expected.abs().max().item() if expected.numel() else 0.0
    tolerance = tolerance or TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * largest)


def step(function, x, dy, parameters=()):
    """Outputs and gradients of one forward and backward pass, on a leaf of its own."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)]


def same_steps(stock, ours, x, dy):
    """Run both layers on the same input; outputs, gradients and buffers must agree."""
    expected = step(stock, x, dy, [p for p in stock.parameters() if p.requires_grad])
    actual = step(ours, x, dy, [p for p in ours.parameters() if p.requires_grad])
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        same(a, e)
    same_buffers(ours, stock)


def same_buffers(ours, stock):
    theirs = dict(stock.named_buffers())
    for name, buffer in ours.named_buffers():
        same(buffer, theirs.pop(name))
    assert not theirs
