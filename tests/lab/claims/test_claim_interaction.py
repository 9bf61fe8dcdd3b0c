import pytest
import torch
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import interaction
from batchnorm.lab.networks.chain import Chain


def results_of(kind):
    powers = {"confirmed": [1.0] * 5, "refuted": [0.5] * 5, "inconclusive": [0.6, 0.7, 1.0, 1.0, 1.0]}[kind]
    sizes = interaction.CLAIM.parts("quick")[0]["sizes"]
    seeds = [
        {stage: [{"own": 1.0, "others": m**-p, "eval": 0.0} for m in sizes] for stage in interaction.STAGES}
        for p in powers
    ]
    return [{"sizes": sizes, "seeds": seeds}]


def test_the_rule_gives_every_verdict():
    check_rule(interaction.CLAIM, results_of)


def test_a_dependence_in_evaluation_refutes():
    (result,) = results_of("confirmed")
    result["seeds"][0]["after training"][0]["eval"] = 1e-6
    part = interaction.Part({}, result)
    assert interaction.judge([part]).outcome == "refuted"


def test_it_is_the_jacobian_that_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(interaction, "STAGES", {"at initialisation": 0})
    found = interaction.measure({"sizes": [4, 8], "seeds": 1}, recorder_of(tmp_path))
    data = interaction.examples(interaction.sets.load("digits"), flat=True).train_inputs.double()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    network = Chain(0).double()
    jacobian = torch.autograd.functional.jacobian(network, data[order[:4]]).transpose(1, 2)  # out i, in j
    lengths = jacobian.flatten(3).square().sum((2, 3)).sqrt()
    others = (lengths.sum() - lengths.diagonal().sum()) / 12
    row = found["seeds"][0]["at initialisation"][0]
    assert row["others"] == pytest.approx(float(others), rel=1e-9)
    assert row["eval"] == 0.0
