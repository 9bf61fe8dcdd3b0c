import pytest
import torch
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import figure1
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, Track
from batchnorm.lab.figure1.run import followed
from batchnorm.lab.figure1.settings import PLAIN, WITH, Figure1Settings

CURVE = {"steps": [10, 20], "median": [0.5, 0.9], "low": [0.4, 0.8], "high": [0.6, 0.95]}
SWEEP = [{"rate": rate, "accuracies": [0.9, 0.8, 0.9], "diverged": 0} for rate in (0.1, 1.0)]


def network(accuracies, drifts):
    shown = {"steps": [10, 20], "percentiles": [[-1, -1], [0, 0], [1, 1]], "curve": CURVE, "sweep": SWEEP, "rate": 1.0}
    return {"accuracies": list(accuracies), "drifts": list(drifts), **shown}


def results_of(kind):
    reads, moves = {
        "confirmed": ((0.95, 0.96, 0.955, 0.957, 0.96), (0.5, 0.6, 0.55, 0.52, 0.58)),
        "refuted": ((0.95, 0.96, 0.955, 0.957, 0.96), (5.0, 6.0, 5.5, 5.2, 5.8)),
        "inconclusive": ((0.88, 0.96, 0.9, 0.89, 0.96), (0.5, 0.6, 0.55, 0.52, 0.58)),
    }[kind]
    plain = network((0.9, 0.91, 0.89, 0.9, 0.92), (2.0, 2.1, 1.9, 2.2, 2.0))
    return [{WITH: network(reads, moves), PLAIN: plain}, {WITH: plain, PLAIN: plain}]


def test_the_rule_gives_every_verdict():
    check_rule(figure1.CLAIM, results_of)


def test_the_unit_that_is_shown_is_of_the_seed_with_the_median_drift():
    steps = (10, 20)

    def track(seed, far):
        values = [torch.zeros(3, 2), torch.full((3, 2), far)]
        return followed(Curve(Member(1.0, seed), steps, (0.5, 0.6), (1.0, 0.9)), values, units=2)

    tracks = tuple(track(seed, far) for seed, far in enumerate((5.0, 1.0, 3.0)))
    assert isinstance(tracks[0], Track)
    outcome = Figure1Outcome(Figure1Settings(steps=20, every=10, inits=("xavier",)), (), "digits", "", "")
    found = figure1.kept(Figure1Entry(WITH, "xavier", 1.0, (), tracks), outcome)
    assert found["drifts"] == [5.0, 1.0, 3.0]
    assert found["percentiles"] == [[0.0, 3.0]] * 3
    assert found["accuracies"] == pytest.approx([0.55] * 3)


def test_a_short_run_measures_both_networks():
    found = figure1.measure({"init": "xavier", "data": "digits", "steps": 4, "seeds": 1}, Silent())
    assert set(found) == {WITH, PLAIN}
    assert len(found[WITH]["sweep"]) == 5
    assert found[PLAIN]["drifts"][0] > 0
