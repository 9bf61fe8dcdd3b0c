import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import margins
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.store import Store

NAMES = (margins.BEST, margins.ALIKE)


def results_of(kind):
    small = {"confirmed": 2.0, "refuted": 0.5, "inconclusive": 1.0}[kind]
    spread = [each / 100 for each in range(-5, 5)]

    def one(middle):
        return {
            "rate": 0.3,
            "sweep": [],
            "margins": {name: [middle + each for each in spread] for name in NAMES},
            "test margins": {name: [0.5] * 10 for name in NAMES},
            "accuracies": {name: [0.95] * 10 for name in NAMES},
        }

    return [one(small), one(1.0), one(1.0)]


def test_the_rule_gives_every_verdict():
    check_rule(margins.CLAIM, results_of)


def test_a_network_that_diverged_is_no_evidence():
    options = margins.CLAIM.parts("quick")
    empty = {"rate": 0.3, "sweep": [], "margins": {}, "test margins": {}, "accuracies": {}}
    parts = [margins.Part(own, empty) for own in options]
    assert margins.CLAIM.judge(parts).outcome == "inconclusive"


def test_a_part_measures_the_networks_that_were_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(margins, "TUNING_SEEDS", (101,))
    monkeypatch.setattr(margins, "RATES", (0.1,))
    run = margins.CLAIM.runs("quick")[0]
    options = {**run.options, "steps": 60, "seeds": 1, "probed": 8}
    result = margins.measure(options, Recorder(Store(tmp_path).add(run)))
    assert result["rate"] == pytest.approx(0.1)
    for name in (margins.BEST, margins.ALIKE):
        assert len(result["margins"][name]) == len(result["accuracies"][name]) == 1
        assert all(0.2 < accuracy <= 1 for accuracy in result["accuracies"][name])
        assert all(0 < distance < 8 for key in ("margins", "test margins") for distance in result[key][name])
    assert result["margins"][margins.BEST] != result["margins"][margins.ALIKE]  # the rates differ
    assert result["margins"] != result["test margins"]  # training images and test images
    assert torch.is_grad_enabled()
