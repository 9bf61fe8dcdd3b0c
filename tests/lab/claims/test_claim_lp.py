import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import lp
from batchnorm.layers.batch import BatchNorm1d


def results_of(kind):
    largest = {"confirmed": 0.95, "refuted": 0.85, "inconclusive": 0.94}[kind]
    middle = {lp.PLAIN: 0.9, lp.L2: 0.96, lp.L1: 0.96, lp.LARGEST: largest}
    curve = {"steps": [1, 2], "median": [0.1, 0.2], "low": [0.1, 0.2], "high": [0.1, 0.2]}
    sweep = [{"rate": 0.1, "accuracies": [0.5, 0.6, 0.7], "diverged": 0}]
    spread = (-0.002, -0.001, 0.0, 0.001, 0.002)
    return [
        {"rate": 0.1, "sweep": sweep, "accuracies": [middle[arm] + each for each in spread], "diverged": 0}
        | {"curve": curve}
        for arm in lp.ARMS
    ]


def test_the_rule_gives_every_verdict():
    check_rule(lp.CLAIM, results_of)


def test_with_p_2_it_is_batch_normalization():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
    layer, ours = lp.LpNorm(4, 2.0), BatchNorm1d(4)
    torch.testing.assert_close(layer(x), ours(x), atol=1e-4, rtol=0)
    torch.testing.assert_close(layer.mean, ours.running_mean)


@pytest.mark.parametrize("p", [1.0, float("inf")])
def test_every_unit_has_mean_0_and_norm_1_and_evaluation_takes_the_running_averages(p):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1
    layer = lp.LpNorm(4, p, momentum=1.0)
    y = layer(x).double()
    sizes = y.abs().mean(0) if p == 1 else y.abs().max(0).values
    torch.testing.assert_close(y.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(sizes, torch.ones(4, dtype=torch.float64), atol=1e-4, rtol=0)
    torch.testing.assert_close(layer.eval()(x[:3]).double(), y[:3])
