import math

import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import equilibrium
from batchnorm.lab.decayed import angles


def results_of(kind):
    factor = {"confirmed": 1.02, "refuted": 1.6, "inconclusive": 1.25}[kind]
    results = []
    for momentum in equilibrium.MOMENTA:
        cells = [(rate, decay, momentum) for rate in equilibrium.RATES for decay in equilibrium.DECAYS]
        rows = [
            [equilibrium.predicted(*cell) * (factor + each) for each in (-0.02, -0.01, 0.0, 0.01, 0.02)]
            for cell in cells
        ]
        results.append({"angles": rows, "courses": [[0.2, 0.1]] * len(cells), "at": [5, 10]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(equilibrium.CLAIM, results_of)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_prediction_is_that_of_a_random_walk_on_a_sphere(momentum):
    """A gradient without any direction, of length 1 / ||w|| and at right angles to w: the theory's terms alone."""
    stream = torch.Generator().manual_seed(0)
    rate, decay, w = 0.1, 0.05, torch.randn(400, generator=stream, dtype=torch.float64)
    velocity, found = torch.zeros_like(w), []
    for step in range(1500):
        noise = torch.randn(400, generator=stream, dtype=torch.float64)
        noise = noise - w * (noise @ w) / (w @ w)
        velocity = momentum * velocity + noise / noise.norm() / w.norm() + decay * w
        new = w - rate * velocity
        if step > 1000:
            found.append(float(angles([w[None]], [new[None]])) ** 2)
        w = new
    assert math.sqrt(sum(found) / len(found)) == pytest.approx(equilibrium.predicted(rate, decay, momentum), rel=0.05)


def test_small_angles_are_exact():
    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(1e-4), math.sin(1e-4)]])
    assert float(angles([one], [7 * other])) == pytest.approx(1e-4, rel=1e-3)
