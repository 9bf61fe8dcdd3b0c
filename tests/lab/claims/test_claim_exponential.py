import itertools

import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import exponential
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import decayed, noisy_batches
from batchnorm.lab.ensemble import Copies


def results_of(kind):
    distance = {"confirmed": 1e-12, "refuted": 1e-3, "inconclusive": float("nan")}[kind]
    course = {"loss": [2.0, 1.0], "norm": [8.0, 4.0]}
    arms = (exponential.DECAY, exponential.GROWING, exponential.NEITHER)
    return [
        {"distance": [1e-12, distance, 1e-12], "control": [0.5] * 3, "growth": [2.0, 4.0, 9.0], "at": [1, 2]}
        | {"courses": dict.fromkeys(arms, course)}
    ]


def test_the_rule_gives_every_verdict():
    check_rule(exponential.CLAIM, results_of)


def test_the_growing_rates_are_those_that_undo_the_decay_of_a_scalar():
    """By hand, with the gradient -1/w, which falls with the scale as that of a weight in front of BN."""
    rate, decay = torch.tensor([0.3]), torch.tensor([0.1])
    w, v = torch.tensor([2.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    for step in range(20):
        w = w - rate * (-1 / w + decay * w)
        v = v + exponential.grown(rate.double(), decay.double(), step) / v
    assert float(w / v) == pytest.approx(float((1 - rate * decay) ** 20), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_many_copies_are_trained_as_by_torch(momentum):
    data = examples(sets.load("digits"), flat=True).to(torch.float64)
    networks = [exponential.network(seed) for seed in (0, 1)]
    rates, decays = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0.02, 0.01], dtype=torch.float64)
    stack = Copies(networks)
    momenta = torch.full((2,), momentum, dtype=torch.float64)
    stream = noisy_batches(data, (0, 1), 16)
    decayed(
        stack, stream, 3, lambda step: rates, decays=decays, momenta=momenta,
        hidden=exponential.hidden, others=torch.full((2,), 0.05, dtype=torch.float64),
    )  # fmt: skip
    for index, network in enumerate(networks):
        own = [p for name, p in network.named_parameters() if exponential.hidden(name)]
        rest = [p for name, p in network.named_parameters() if not exponential.hidden(name)]
        optimizers = (
            torch.optim.SGD(own, float(rates[index]), momentum, weight_decay=float(decays[index])),
            torch.optim.SGD(rest, 0.05),
        )
        for x, labels in itertools.islice(noisy_batches(data, (index,), 16), 3):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(x[0]), labels[0]).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name, tensor in network.named_parameters():
            torch.testing.assert_close(stack.named[name][index].detach(), tensor.detach(), atol=1e-12, rtol=1e-9)
