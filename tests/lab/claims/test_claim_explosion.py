import math

import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import explosion


def results_of(kind):
    plain, skips = {"confirmed": (1.467, 1.1), "refuted": (1.0, 1.1), "inconclusive": (1.467, 1.211)}[kind]
    factors = {explosion.PLAIN: plain, explosion.SKIPS: skips, explosion.NONE: 1.0}
    return [
        {
            "squares": [[factors[arm] ** -layer for layer in range(12)]] * 5,
            "factors": [factors[arm] + each for each in (-0.004, -0.002, 0.0, 0.002, 0.004)],
        }
        for arm in explosion.COLORS
    ]


def test_the_rule_gives_every_verdict():
    check_rule(explosion.CLAIM, results_of)


@pytest.mark.parametrize("arm", explosion.COLORS)
def test_the_gradients_are_those_of_finite_differences(arm):
    """Move the input of the first layer, and compare the change of the loss with the gradient's length."""
    seed, depth, width, batch = 3, 2, 8, 6  # wide: no example is 0 behind a layer
    ratio = explosion.squared_gradients(arm, depth, width, batch, seed)
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, width, generator=stream).double()
    weights = [torch.randn(width, width, generator=stream).double() * math.sqrt(2 / width) for _ in range(depth)]
    slope = torch.randn(batch, width, generator=stream).double()

    def norm(z):
        return (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt()

    def loss(h, layers):
        for weight in layers:
            if arm == explosion.SKIPS:
                h = h + torch.relu(norm(h)) @ weight.T
            else:
                h = torch.relu(norm(h @ weight.T) if arm == explosion.PLAIN else h @ weight.T)
        return float((h * slope).sum())

    def square(h, layers, step=1e-5):
        total = 0.0
        for index in range(h.numel()):
            change = torch.zeros(h.numel(), dtype=torch.float64)
            change[index] = step
            change = change.view_as(h)
            total += ((loss(h + change, layers) - loss(h - change, layers)) / (2 * step)) ** 2
        return total

    if arm == explosion.SKIPS:
        second = x + torch.relu(norm(x)) @ weights[0].T
    else:
        z = x @ weights[0].T
        second = torch.relu(norm(z) if arm == explosion.PLAIN else z)
    assert ratio == pytest.approx([square(x, weights) / square(second, weights[1:]), 1.0], rel=1e-3)
