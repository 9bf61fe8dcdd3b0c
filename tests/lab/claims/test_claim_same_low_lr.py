from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import same_low_lr
from batchnorm.lab.judge.claim import Part

LOW, HIGH = 0.01, 0.3  # without BN one seed diverges from 0.1 on: 0.03 is the last stable rate, 0.01 is safe


def rows(at_low, at_high, spread=0.0, plain=False):
    values = {LOW: [at_low + spread * (seed - 2) for seed in range(5)], HIGH: [at_high] * 5}
    own = [
        {"rate": rate, "accuracies": values.get(rate, [0.1] * 5), "diverged": int(plain and rate > 0.03)}
        for rate in same_low_lr.RATES
    ]
    return {"tuning": own, "fresh": own}


def results_of(kind):
    same, raised = {"confirmed": (0.91, 0.98), "refuted": (0.97, 0.98), "inconclusive": (0.94, 0.98)}[kind]
    return [rows(0.9, 0.2, plain=True), rows(same, raised, 0.01 if kind == "inconclusive" else 0.0)]


def test_the_rule_gives_every_verdict():
    check_rule(same_low_lr.CLAIM, results_of)


def test_networks_are_compared_at_a_rate_that_the_one_without_bn_bears():
    options = same_low_lr.parts("quick")
    parts = [Part(own, result) for own, result in zip(options, results_of("confirmed"), strict=True)]
    low, high, found = same_low_lr.compared(parts)
    assert (low, high) == (LOW, HIGH)
    assert found["plain"][0] == 0.9
    assert found["same"][0] == 0.91
    assert found["raised"][0] == 0.98


def test_an_arm_is_measured_at_every_rate_and_resumed():
    recorder = Silent()
    options = {"arm": "without BN", "data": "digits", "steps": 2, "seeds": 2}
    found = same_low_lr.measure(options, recorder)
    assert [len(row["accuracies"]) for row in found["fresh"]] == [2] * 7
    recorder.stored = True
    recorder.progress = None  # nothing is trained again
    assert same_low_lr.measure(options, recorder) == found
