import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import covariate_shift as claim


def results_of(kind):
    away = {"confirmed": [0.5] * 5, "refuted": [0.05] * 5, "inconclusive": [0.05, 0.06, 0.1, 0.5, 0.5]}[kind]
    seeds = []
    for each in away:
        errors = {"home": 0.05, "away": each, "away, refitted": 0.05, "away, standardised anew": 0.5}
        errors |= {"other units": 0.5, "other units, standardised anew": 0.05}
        inside = {"none": [0.1] * 5, "batch": [0.1] * 5}
        seeds.append({**dict.fromkeys(claim.names(), errors), "inside": inside, "correlation": [0.7, 0.4]})
        seeds[-1]["fits"] = dict.fromkeys(claim.MODELS, [0.0] * len(claim.GRID))
    return [{"seeds": seeds}]


def test_the_rule_gives_every_verdict():
    check_rule(claim.CLAIM, results_of)


def test_the_line_is_that_of_least_squares():
    x, y = claim.samples(claim.HOME, 1, torch.Generator().manual_seed(0))
    model = claim.model_of("linear", x, y, 0, 1, lambda: None)
    slope = torch.cov(torch.cat([x, y], 1).T)[0, 1] / x.var()
    expected = y.mean() + slope * (2.0 - x.mean())
    with torch.no_grad():
        assert model(torch.tensor([[2.0]])).item() == pytest.approx(float(expected), rel=1e-4)


def test_a_change_of_units_is_undone_by_standardising_anew():
    x, y = claim.samples(claim.HOME, 2, torch.Generator().manual_seed(1))
    model = claim.model_of("network", x, y, 0, 20, lambda: None)
    moved = claim.SCALE * x + claim.MOVE
    assert claim.error(claim.restandardised(model, moved), moved, y) == pytest.approx(
        claim.error(model, x, y), rel=1e-4
    )
    assert claim.error(model, moved, y) > 2 * claim.error(model, x, y)


def test_a_correlation_is_smaller_in_a_part_of_the_range():
    whole, upper = claim.correlations(0)
    assert whole == pytest.approx(0.5**0.5, abs=0.04)
    assert 0 < upper < whole - 0.1
