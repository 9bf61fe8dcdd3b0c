import torch
from rules import check_rule

from batchnorm.lab.claims import heads
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples

DATA = examples(sets.load("digits"))


def results_of(kind):
    each = {"confirmed": [0.95] * 5, "refuted": [0.8] * 5, "inconclusive": [0.79, 0.8, 0.83, 0.9, 0.95]}[kind]
    results = []
    for arm in heads.ARMS:
        own = [0.8] * 5 if arm == heads.SHARED else each
        results.append({"rate": 0.1, "sweep": [], "fresh": [{"score": score, "scales": [score] * 2} for score in own]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(heads.CLAIM, results_of)


def test_the_arms_differ_in_their_statistics_only():
    x = DATA.train_inputs[:32]
    networks = {arm: heads.TwoScales(arm, 0, x).train() for arm in heads.ARMS}
    scores = {arm: network(x) for arm, network in networks.items()}
    torch.testing.assert_close(scores[heads.SHARED], scores[heads.EACH])  # in training they are the same
    assert not torch.allclose(scores[heads.SHARED], scores[heads.JOINT])
    given = [
        torch.relu(lateral(own)) for lateral, own in zip(networks[heads.EACH].laterals, heads.scales(x), strict=True)
    ]
    first = networks[heads.EACH].head
    for name, own in zip(heads.SCALES, given, strict=True):
        mean = first.linears[0](own).mean(0)
        torch.testing.assert_close(first.norms[0].norm.layer_of(name).running_mean, 0.1 * mean)
    mean = first.linears[0](torch.cat(given)).mean(0)
    torch.testing.assert_close(networks[heads.JOINT].head.norms[0].running_mean, 0.1 * mean)


def test_the_score_is_the_mean_of_the_scales():
    network = heads.TwoScales(heads.JOINT, 0, DATA.train_inputs)
    x, y = DATA.validation_inputs, DATA.validation_labels
    found = heads.accuracies(network, x, y)
    with torch.no_grad():
        fine, coarse = network.eval()(x)
    expected = [float((scores.argmax(1) == y).double().mean()) for scores in (fine, coarse)]
    assert found == {"score": sum(expected) / 2, "scales": expected}
