import pytest
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import regulariser


def results_of(kind):
    small = {"confirmed": [0.1] * 5, "refuted": [0.001] * 5, "inconclusive": [0.001, 0.001, 0.01, 0.1, 0.1]}[kind]
    results = []
    for arm in regulariser.ARMS:
        losses = small if arm == regulariser.SMALLEST else [0.01] * 5
        fresh = [{"loss": loss, "noisy": loss, "test": 0.2, "accuracy": 0.9} for loss in losses]
        results.append({"rate": 0.1, "sweep": [], "rates": [{"rate": r, "fresh": fresh} for r in regulariser.RATES]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(regulariser.CLAIM, results_of)


def test_small_groups_and_dropout_are_what_differs():
    whole, small = (regulariser.network_of(arm, 3) for arm in (regulariser.WHOLE, regulariser.SMALLEST))
    assert [norm.virtual_batch_size for norm in (*whole.norms, *small.norms)] == [128] * 3 + [8] * 3
    assert whole.linears[0].weight.equal(small.linears[0].weight)
    assert [regulariser.network_of(arm, 0).linears[0].bias is None for arm in regulariser.ARMS] == [True] * 4 + [
        False
    ] * 2


def test_every_fresh_seed_is_measured_at_every_rate(tmp_path):
    options = {"arm": regulariser.WHOLE, "data": "digits", "examples": 128, "steps": 10, "seeds": 2}
    found = regulariser.measure(options, recorder_of(tmp_path))
    assert [len(row["fresh"]) for row in found["rates"]] == [2, 2, 2, 2]
    assert found["rate"] in regulariser.RATES
    fast = found["rates"][-2]["fresh"][0]
    assert fast["loss"] < fast["test"]  # it has begun to know its few examples
    part = regulariser.Part(options, found)
    assert regulariser.values(part, "gap", regulariser.RATES[-2])[0] == pytest.approx(fast["test"] - fast["loss"])
