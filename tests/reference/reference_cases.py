"""What the tests of the reference share: shapes, names, comparisons, finite differences."""

import numpy as np
import torch
import torch.nn.functional as F

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = [(6, 3), (5, 4, 7), (3, 4, 2, 5), (2, 6, 2, 3, 2)]
ACTIVATIONS = ["none", "relu", "relu6", "leaky_relu", "silu"]
MEMBERS = ["batch", "layer", "instance", "group", "rms"]
TORCH_ACTIVATION = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "silu": F.silu,
}


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, **EXACT)


def differ(a, b, by=1e-2):
    assert np.max(np.abs(np.asarray(a) - np.asarray(b))) > by


def slope(f, a, h=1e-6):
    """The gradient of the scalar ``f`` at ``a`` by central differences."""
    d = np.empty_like(a)
    for i in np.ndindex(a.shape):
        step = np.zeros_like(a)
        step[i] = h
        d[i] = (f(a + step) - f(a - step)) / (2 * h)
    return d


def agree(actual, numeric):
    assert actual.shape == numeric.shape
    np.testing.assert_allclose(actual, numeric, rtol=1e-6, atol=1e-7)
    assert np.max(np.abs(numeric)) > 1e-3, "a vanishing gradient tests nothing"


def tensor(a):
    return torch.tensor(a, dtype=torch.float64, requires_grad=True)


def example(rng, shape):
    """Input, output gradient, residual, and a gamma and beta that send some of z below 0 and above 6."""
    channels = shape[1]
    x, dy, residual = (rng.normal(3.0, 2.0, shape), rng.normal(size=shape), rng.normal(size=shape))
    return x, dy, residual, rng.uniform(2.0, 5.0, channels), rng.uniform(1.0, 4.0, channels)
