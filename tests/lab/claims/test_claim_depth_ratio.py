import math

import torch
from rules import check_rule
from silent import Silent
from test_claim_race import CURVE, SWEEP, arm

from batchnorm.lab.claims import depth_ratio
from batchnorm.lab.judge.claim import Part
from batchnorm.lab.networks.residual import Residual

PLAIN = (900, 910, 920, 930, 940)


def race_at(blocks, *fast):
    names = ("without BN", "BN x1", "BN x5", "BN x30", "SkipInit", "clipping")
    arms = {name: arm(*(PLAIN if name == "without BN" else fast)) for name in names}
    return {"blocks": blocks, "target": 0.9, "fastest": "BN x5", "arms": arms, "sweep": SWEEP}


def results_of(kind):
    shallow = (450, 460, 470, 480, 490)
    deep = {
        "confirmed": (90, 91, 92, 93, 94),
        "refuted": (900, 910, 920, 930, math.inf),
        "inconclusive": (100, 900, 450, 470, 800),
    }[kind]
    small = {"rate": 0.1, "sweep": SWEEP, "accuracies": [0.9] * 5, "diverged": 0, "curve": CURVE}
    return [race_at(2, *shallow), race_at(6, *shallow), race_at(10, *shallow), race_at(14, *deep), small]


def test_the_rule_gives_every_verdict():
    check_rule(depth_ratio.CLAIM, results_of)


def test_depths_at_which_the_plain_network_does_not_train_give_no_ratio():
    empty = {"blocks": 2, "target": None, "fastest": None, "arms": {}, "sweep": []}
    options = depth_ratio.parts("quick")
    results = [empty, empty, empty, *results_of("confirmed")[3:]]
    parts = [Part(own, result) for own, result in zip(options, results, strict=True)]
    assert depth_ratio.CLAIM.judge(parts).outcome == "inconclusive"
    assert depth_ratio.CLAIM.draw(parts)


def test_small_branches_keep_the_variance_that_he_weights_let_grow():
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    small, usual = depth_ratio.small(0, blocks=12), Residual(0, blocks=12, norm="none")

    def growth(network):
        h = first = network.unit(0, x)
        for block in range(12):
            h = network.unit(2 * block + 2, network.unit(2 * block + 1, h), h)
        return float(h.square().mean() / first.square().mean())

    with torch.no_grad():
        assert growth(usual) > 10 * growth(small)
    assert torch.equal(small.linears[1].weight, usual.linears[1].weight)
    assert torch.allclose(small.linears[2].weight, usual.linears[2].weight / math.sqrt(12))


def test_the_extra_arm_is_measured():
    found = depth_ratio.measure({"part": depth_ratio.SMALL, "blocks": 1, "steps": 4, "seeds": 1}, Silent())
    assert len(found["accuracies"]) == 1
    assert len(found["sweep"]) == 9
