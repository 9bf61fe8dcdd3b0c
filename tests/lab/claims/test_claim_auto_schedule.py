import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import auto_schedule
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import as_vectors, decayed, invariant, noisy_batches
from batchnorm.lab.ensemble import Copies


def results_of(kind):
    power = {"confirmed": 0.25, "refuted": 0.05, "inconclusive": 0.2}[kind]
    at = auto_schedule.recorded(1000)
    rows = [[float(step) ** (power + each) for step in at] for each in (-0.02, -0.01, 0.0, 0.01, 0.02)]
    result = {"at": at, "norms": {f"{rate:g}": rows for rate in auto_schedule.RATES}}
    return [result, result]


def test_the_rule_gives_every_verdict():
    check_rule(auto_schedule.CLAIM, results_of)


def test_squared_norms_grow_by_the_squared_steps():
    """||w||^2 of a later step is ||w||^2 before plus ||step||^2, for each layer: steps are at right angles."""
    stack = Copies([invariant(seed) for seed in (0, 1)])
    data = examples(sets.load("digits"), flat=True)
    before = [tensor.clone() for tensor in stack.parameters]
    decayed(stack, noisy_batches(data, (0, 1), 32, 0.5), 1, lambda step: torch.tensor([3.0, 1.0]))
    for old, new in zip(before, stack.parameters, strict=True):
        grown = as_vectors([new]).square().sum(1) - as_vectors([old]).square().sum(1)
        step = as_vectors([new - old]).square().sum(1)
        assert grown.tolist() == pytest.approx(step.tolist(), rel=1e-2)
        assert float(step.min()) > 1e-4


def test_noisy_labels_are_drawn_anew_and_the_others_stay():
    data = examples(sets.load("digits"), flat=True)
    _, true = next(noisy_batches(data, (5,), 1000))
    _, noisy = next(noisy_batches(data, (5,), 1000, 0.5))
    assert 0.5 < float((true == noisy).float().mean()) < 0.6  # half stay, and a tenth of the others by chance
