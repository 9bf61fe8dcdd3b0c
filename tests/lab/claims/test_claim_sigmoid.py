import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import sigmoid


def results_of(kind):
    plain, normed = {
        "confirmed": (around(0.1), around(0.95)),
        "refuted": (around(0.6), around(0.95)),
        "inconclusive": (around(0.3, 0.1), around(0.95)),
    }[kind]
    return [contest(*plain), contest(*normed), contest(*around(0.9))]


def test_the_rule_gives_every_verdict():
    check_rule(sigmoid.CLAIM, results_of)


def test_the_signal_dies_in_the_plain_network_and_not_in_the_others():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))

    def spread(arm):
        network = sigmoid.build(arm, 0)
        with torch.no_grad():
            return float(network.last_inputs(x).std(0).mean())  # over examples: what the layers know of them

    assert spread(sigmoid.PLAIN) < 1e-4 < 1e-2 < spread(sigmoid.LARGER)
    assert spread(sigmoid.WITH) > 0.9


def test_an_arm_is_measured():
    found = sigmoid.measure({"arm": sigmoid.PLAIN, "data": "digits", "steps": 3, "seeds": 2}, Silent())
    assert len(found["accuracies"]) == 2
    assert [row["rate"] for row in found["sweep"]] == list(sigmoid.RATES)
