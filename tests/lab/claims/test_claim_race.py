import math

import pytest
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import race
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth import facts
from batchnorm.lab.depth.arms import PLAIN, DepthSettings
from batchnorm.lab.depth.outcome import DepthEntry, DepthOutcome

CURVE = {"steps": [10, 20], "median": [0.5, 0.9], "low": [0.4, 0.8], "high": [0.6, 0.95]}
SWEEP = [{"rate": rate, "accuracies": [0.9, 0.8, 0.9], "diverged": 0} for rate in (0.1, 1.0)]


def arm(*steps):
    own = {"rate": 0.1, "accuracy": 0.9, "diverged": 0, "curve": CURVE}
    return {**own, "steps": list(steps), "to_share": list(steps)}


def results_of(kind):
    same, raised = {
        "confirmed": ((500, 520, 510, 530, 515), (100, 120, 110, 105, 90)),
        "refuted": ((1490, 1460, 1470, 1480, math.inf), (100, 120, 110, 105, 90)),
        "inconclusive": ((500, 1480, 1000, 1300, 1450), (100, 120, 110, 105, 90)),
    }[kind]
    arms = {"without BN": arm(1000, 1100, 1200, 1300, 1250), "BN x1": arm(*same), "BN x5": arm(*raised)}
    return [{"blocks": 10, "target": 0.9, "fastest": "BN x5", "arms": arms, "sweep": SWEEP}]


def test_the_rule_gives_every_verdict():
    check_rule(race.CLAIM, results_of)


def test_a_network_without_bn_that_does_not_train_is_no_evidence():
    result = {"blocks": 10, "target": None, "fastest": None, "arms": {}, "sweep": []}
    parts = [race.Part(race.parts("quick")[0], result)]
    assert race.CLAIM.judge(parts).outcome == "inconclusive"
    assert race.CLAIM.draw(parts)


def test_the_figures_are_those_of_the_curves():
    steps = tuple(range(10, 80, 10))

    def curve(seed, rate, *accuracies):
        return Curve(Member(rate, seed), steps, accuracies, (1.0,) * 7)

    slow = (0.5,) * 6 + (1.0,)  # smoothed over 5 validations: 0.6 at step 70
    fast = (0.5, 0.66, 0.65) + (0.7,) * 4  # 0.58, which is above 95% of it, at step 20, and 0.6 at step 30
    plain = DepthEntry(10, PLAIN.name, 0.1, (curve(1000, 0.1, *slow),), (curve(0, 0.1, *slow),))
    normed = DepthEntry(10, "BN x5", 0.5, (curve(1000, 0.5, *fast),), (curve(0, 0.5, *fast),))
    found = facts.facts_of(DepthOutcome(DepthSettings(seeds=1), (plain, normed), 10, 450), 10)
    assert found["fastest"] == "BN x5"
    assert found["target"] == pytest.approx(0.6)
    assert found["arms"]["without BN"]["steps"] == [70]
    assert found["arms"]["BN x5"]["steps"] == [30]
    assert found["arms"]["BN x5"]["to_share"] == [20]
    assert race.times(found, "BN x5", "to_share") == 3.5


def test_a_seed_that_never_arrives_counts_against_the_claim():
    never = [math.inf] * 5
    result = {"target": 0.9, "fastest": "BN x5", "arms": {"without BN": arm(*never), "BN x1": arm(*never)}}
    result["arms"]["BN x5"] = arm(*[750] * 5)
    estimates = race.judge([race.Part({"steps": 1500}, result)]).estimates
    assert [estimate.value for estimate in estimates] == [2.0, 0.0, 2.0]


def test_a_short_race_runs():
    recorder = Silent()
    found = facts.raced(1, {"seeds": 1, "steps": 5, "rates": (0.1,), "sigmoid_rates": (0.1,), "width": 4}, recorder)
    assert found["blocks"] == 1
    assert set(found["arms"]) >= {"without BN", "SkipInit", "clipping"}
    assert recorder.done <= recorder.total


def test_a_race_that_was_killed_goes_on_with_its_parts(monkeypatch):
    options, recorder = {"seeds": 1, "steps": 5, "rates": (0.1,), "sigmoid_rates": (0.1,), "width": 4}, Silent()
    found = facts.raced(1, options, recorder)

    def train(*arguments, **more):
        raise AssertionError("a part that is done is trained again")

    monkeypatch.setattr("batchnorm.lab.depth.run.train", train)
    recorder.stored = True
    assert facts.raced(1, options, recorder) == found
    del recorder.lines[0]
    with pytest.raises(AssertionError, match="trained again"):
        facts.raced(1, options, recorder)
