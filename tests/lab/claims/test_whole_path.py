"""Claims from their options to a row of the page, in a setting of seconds; the verdict where arithmetic decides it."""

import json

import pytest
from silent import Silent

from batchnorm.lab.claims import claim_named
from batchnorm.lab.judge.claim import Part
from batchnorm.lab.judge.figures import entry
from batchnorm.lab.judge.measure import ClaimState
from batchnorm.lab.judge.records import claim_fields
from batchnorm.records import plain

SMALL = {
    "algebra": {"networks": 3},
    "nonlinear": {"layers": 5},
    "learning-rate": {"blocks": 1, "steps": 5, "seeds": 3},
    "race": {"steps": 5, "seeds": 3, "width": 4, "rates": (0.01, 0.1), "sigmoid_rates": (0.1,)},
    "depth-ratio": {"blocks": 1, "steps": 5, "seeds": 3},
    "figure1": {"steps": 5, "seeds": 3},
    "sigmoid": {"steps": 3, "seeds": 3},
    "same-low-lr": {"steps": 3, "seeds": 3},
    "init": {"steps": 1, "seeds": 3},
    "depth": {"layers": 100, "steps": 1, "width": 2, "seeds": 3},
    "bn-only": {"blocks": 1, "width": 8, "steps": 3, "seeds": 3},
    "transformer": {"characters": 2000, "length": 8, "width": 8, "blocks": 1, "steps": 2, "seeds": 3},
    "recurrent": {"pieces": 4, "width": 4, "steps": 2, "seeds": 3},
    "no-norm": {"blocks": 1, "steps": 3, "seeds": 3},
    "noise": {"layers": 2, "width": 8, "steps": 6, "seeds": 3},
    "ics": {"steps": 1, "seeds": 3},
    "auto-schedule": {"steps": 30, "seeds": 3},
    "equilibrium": {"steps": 30, "seeds": 3},
    "exponential": {"steps": 30, "seeds": 1},
    "explosion": {"depth": 16, "width": 128, "batch": 256, "seeds": 3},
    "rank": {"depth": 800, "seeds": 3},
    "landscape": {"steps": 2, "records": 2, "seeds": 3},
    "blind": {"steps": 5, "batch": 64, "seeds": 3},
    "sharpness": {"steps": 6, "records": 3, "examples": 32, "seeds": 3},
    "lp": {"layers": 2, "width": 8, "steps": 3, "seeds": 3},
    "margins": {"width": 8, "steps": 3, "seeds": 3, "probed": 4},
    "smart-init": {"steps": 4, "seeds": 3},
    "population": {"epochs": 5, "seeds": 3},
    "leak": {"steps": 1, "seeds": 3},
    "interaction": {"sizes": [8, 16], "seeds": 3},
    "adaptation": {"steps": 20, "seeds": 3},
    "repair": {"widths": [16] * 2, "steps": 10, "seeds": 3},
    "regulariser": {"examples": 128, "steps": 5, "seeds": 3},
    "covariate-shift": {"steps": 20, "seeds": 3},
    "contrastive": {"steps": 2, "seeds": 3, "widths": [16]},
    "two-norms": {"steps": 3, "seeds": 3},
    "vulnerability": {"blocks": 1, "target": 0.3, "steps": 20, "seeds": 3},
    "local-statistics": {"rounds": 1, "seeds": 3},
    "heads": {"steps": 3, "seeds": 3},
    "joint-batches": {"steps": 5, "seeds": 3},
}
CERTAIN = ("algebra", "nonlinear", "exponential", "rank", "blind")


@pytest.mark.parametrize("name", SMALL)
def test_a_claim_is_measured_judged_and_drawn(name):
    claim, recorder = claim_named(name), Silent()
    parts = []
    for options in claim.parts("quick"):
        assert SMALL[name].keys() <= {*options, "width", "rates", "sigmoid_rates"}
        own = {**options, **SMALL[name]}
        if own not in [part.options for part in parts]:
            recorder.facts = {}
            result = json.loads(json.dumps(plain(claim.measure(own, recorder))))  # as a store holds it
        parts.append(Part(own, next((part.result for part in parts if part.options == own), result)))
    assert 0 < recorder.done <= recorder.total
    judgement = claim.judge(parts)
    shown = entry(json.loads(json.dumps(claim_fields(ClaimState(claim, "quick", tuple(parts), judgement, 1.0)))))
    assert shown.outcome == judgement.outcome
    assert shown.sections
    assert len(shown.intervals) == len(judgement.estimates) > 0
    if name in CERTAIN:
        assert judgement.outcome == "confirmed"


def test_without_skips_the_gradient_explodes_also_in_a_narrow_network():
    claim = claim_named("explosion")
    own = [{**options, **SMALL["explosion"]} for options in claim.parts("quick")]
    plain_bn, skips, none = (sorted(claim.measure(options, Silent())["factors"])[1] for options in own)
    assert plain_bn > 1.35 > 1.2 > max(skips, none)
