import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import depth


def results_of(kind):
    plain = {"confirmed": around(0.1), "refuted": around(0.8), "inconclusive": around(0.3, 0.1)}[kind]
    by_arm = {"without BN": plain, "with BN": around(0.9), "SkipInit": around(0.9)}
    return [contest(*by_arm[options["arm"]]) for options in depth.parts("quick")]


def test_the_rule_gives_every_verdict():
    check_rule(depth.CLAIM, results_of)


def test_a_shallow_plain_network_may_train():
    options = depth.parts("quick")
    shallow = [
        contest(*around(0.9)) if own["layers"] == 10 else result
        for own, result in zip(options, results_of("confirmed"), strict=True)
    ]
    parts = [depth.Part(own, result) for own, result in zip(options, shallow, strict=True)]
    assert depth.judge(parts).outcome == "confirmed"


def test_without_bn_the_signal_grows_with_every_block_and_with_skip_init_it_does_not():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, skip = (depth.network(0, arm, 100, 16)(x).std() for arm in ("without BN", "SkipInit"))
    assert plain > 1e4 * skip


def test_an_arm_is_measured():
    options = {"arm": "SkipInit", "layers": 6, "width": 4, "steps": 2, "seeds": 2}
    found = depth.measure(options, Silent())
    assert len(found["accuracies"]) == 2
