from rules import check_rule

from batchnorm.lab.claims import landscape
from batchnorm.lab.landscape.settings import PLAIN, SCALED, WITH
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.store import Store

SPAN = (-0.2, -0.1, 0.0, 0.1, 0.2)


def track(arm, corrected, seed, size):
    own = {"loss_low": [1.0] * 2, "loss_high": [1.0 + size] * 2, "change_low": [0.0] * 2, "change_high": [size] * 2}
    return {"arm": arm, "corrected": corrected, "seed": seed, "weights": [9.0, 9.0], **own}


def results_of(kind):
    corrected = {"confirmed": 3.0, "refuted": 0.4, "inconclusive": 1.0}[kind]
    sizes = {(PLAIN, False): 3.0, (PLAIN, True): corrected}
    results = []
    for arms in ((PLAIN,), (WITH, SCALED)):
        tracks = [
            track(arm, corrected, seed, sizes.get((arm, corrected), 1.0) + more)
            for arm in arms
            for corrected in (False, True)
            for seed, more in enumerate(SPAN)
        ]
        results.append({"tracks": tracks, "accuracies": [0.9] * 5})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(landscape.CLAIM, results_of)


def test_a_part_is_measured_and_scaled_weights_change_the_raw_figures_alone(tmp_path):
    run = landscape.CLAIM.runs("quick")[1]
    options = {**run.options, "steps": 2, "records": 2, "seeds": 3}
    result = landscape.measure(options, Recorder(Store(tmp_path).add(run)))
    figures = {(t["arm"], t["corrected"]): t["change_high"][0] for t in result["tracks"] if t["seed"] == 0}
    assert abs(figures[SCALED, True] / figures[WITH, True] - 1) < 0.02
    assert figures[SCALED, False] < figures[WITH, False] / 2
