import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import blind
from batchnorm.lab.networks.layered import Layered


def results_of(kind):
    diagonal, whole = {"confirmed": (1e-20, 0.1), "refuted": (1e-20, 0.9), "inconclusive": (1e-20, 0.5)}[kind]
    spread = (-0.02, -0.01, 0.0, 0.01, 0.02)
    return [
        {
            "linear": [1e-30] * 5,
            "diagonal": [diagonal] * 5,
            "hessian": [whole + each for each in spread],
            "loss": [0.6] * 5,
        }
    ]


def test_the_rule_gives_every_verdict():
    check_rule(blind.CLAIM, results_of)


def test_the_share_is_that_of_the_paper_s_backward_pass():
    """BN's backward pass by its formula: (dy - mean(dy) - y mean(dy y)) / sd."""
    z = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, deviation = z.mean(0), z.var(0, correction=0).sqrt()
    y = (z - mean) / deviation
    dy = 3 * y**2 + y.roll(1, 1)
    through = (dy - dy.mean(0) - y * (dy * y).mean(0)) / deviation
    found = blind.passed(lambda y: (y**3).sum() + (y * y.detach().roll(1, 1)).sum(), z)
    assert found == pytest.approx(float(through.square().sum() / (dy / deviation).square().sum()))


def test_what_all_examples_share_is_hidden_and_what_each_has_is_not():
    network = Layered(0, normalised=True, init="he", activation="relu", inputs=6, width=5, layers=2, classes=3)
    stream = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 6, generator=stream).double(), torch.arange(40) % 3
    found = blind.shares(network.double(), x, labels)
    assert max(found["linear"], found["diagonal"]) < 1e-20
    assert 1e-6 < found["hessian"] < 1
    assert 0.05 < found["loss"] < 1
