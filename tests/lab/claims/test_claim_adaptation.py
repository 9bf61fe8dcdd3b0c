import torch
from rules import check_rule

from batchnorm.lab.claims import adaptation
from batchnorm.lab.networks.chain import Chain


def results_of(kind):
    sorted_gain = {"confirmed": [-0.3] * 5, "refuted": [0.1] * 5, "inconclusive": [-0.1, -0.1, 0.0, 0.1, 0.1]}[kind]

    def accuracies(gain):
        return {"source": 0.5, "statistics": 0.5 + gain, "entropy": 0.5 + gain}

    streams = [{"shuffled": accuracies(0.2), "sorted by class": accuracies(gain)} for gain in sorted_gain]
    return [{"seeds": [dict.fromkeys(adaptation.CORRUPTIONS, each) for each in streams]}]


def test_the_rule_gives_every_verdict():
    check_rule(adaptation.CLAIM, results_of)


def test_statistics_are_those_of_each_batch():
    network = Chain(0, inputs=4, widths=(5,), classes=3)
    x, y = torch.randn(100, 4, generator=torch.Generator().manual_seed(1)), torch.arange(100) % 3
    found = adaptation.accuracies(network, x, y, lambda: None)
    right = {"source": 0, "statistics": 0}
    with torch.no_grad():
        for start in (0, 50):
            z = network.linears[0](x[start : start + 50])
            for way, own in (("source", z), ("statistics", (z - z.mean(0)) / (z.var(0) + 1e-5).sqrt())):
                right[way] += int((network.read_out(own.relu()).argmax(1) == y[start : start + 50]).sum())
    assert found["source"] == right["source"] / 100
    assert found["statistics"] == right["statistics"] / 100
    assert not network.training
    assert torch.equal(network.norms[0].running_mean, torch.zeros(5))
