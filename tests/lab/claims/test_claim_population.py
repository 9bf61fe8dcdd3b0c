import pytest
import torch
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import population
from batchnorm.layers.batch import BatchNorm1d


def results_of(kind):
    excess = {"confirmed": [0.2] * 5, "refuted": [0.0] * 5, "inconclusive": [0.0, 0.0, 0.02, 0.05, 0.05]}[kind]

    def seeds(early):
        ways = [{**dict.fromkeys(population.WAYS, 0.05), "without its start": 0.05 + each} for each in early]
        return [[way, dict.fromkeys(population.WAYS, 0.05)] for way in ways]

    return [{"epochs": [4, 40], "seeds": seeds([0.0] * 5)}, {"epochs": [4, 40], "seeds": seeds(excess)}]


def test_the_rule_gives_every_verdict():
    check_rule(population.CLAIM, results_of)


def test_without_its_start_the_average_is_that_of_the_batches():
    layer = BatchNorm1d(1)
    for _ in range(3):
        layer(torch.tensor([[5.0], [9.0]]))  # mean 7, unbiased variance 8
    found = population.unbiased(layer)
    assert found.running_mean.item() == pytest.approx(7.0)
    assert found.running_var.item() == pytest.approx(8.0, rel=1e-5)
    assert layer.running_mean.item() == pytest.approx(1.897)


def test_the_average_is_behind_at_the_first_look(tmp_path):
    found = population.measure({"batch": 256, "epochs": 4, "seeds": 1}, recorder_of(tmp_path))
    assert found["epochs"] == [1, 2, 4]
    first = found["seeds"][0][0]
    assert set(first) == set(population.WAYS)
    assert first["running average"] > first["precise"]
