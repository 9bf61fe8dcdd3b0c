import copy

import pytest
import torch
from rules import check_rule
from torch import nn

from batchnorm.lab.claims import ics
from batchnorm.observe.probes.shift import shift


def results_of(kind):
    gains = {"confirmed": (-0.3, 0.0), "refuted": (-0.3, 0.2), "inconclusive": (-0.3, 0.05)}[kind]
    results = []
    for gain in (*gains, 0.0):
        for more in (0.0, gain):
            runs = [
                {"cosine": [0.7 + more + 0.01 * seed] * 2, "relative": [0.5, None], "distance": [1, 2], "loss": [1, 2]}
                for seed in range(-2, 3)
            ]
            results.append({"runs": runs, "at": [1, 10]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(ics.CLAIM, results_of)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_probe_is_right_on_the_deep_linear_network(normalised):
    """Take the step of the layers in front with torch's optimizer, on a copy."""
    network = ics.linear_network(3, normalised).double()
    batch = tuple(tensor.double() for tensor in next(ics.linear_batches(3)))
    linears = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    found = shift(network, batch, ics.squares, lr=1e-5, layers=[linears[0], linears[7]])
    place = 7
    other = copy.deepcopy(network)
    ics.squares(other, batch).backward()
    target = dict(other.named_modules())[linears[place]].weight
    before = target.grad.clone()
    modules = list(other.children())
    earlier = nn.Sequential(*modules[: int(linears[place])])
    torch.optim.SGD(earlier.parameters(), 1e-5).step()
    other.zero_grad()
    ics.squares(other, batch).backward()
    expected = torch.cosine_similarity(before.flatten(), target.grad.flatten(), dim=0)
    assert found.cosines[0] == pytest.approx(1.0)
    assert found.cosines[1] == pytest.approx(float(expected), abs=1e-9)
    assert found.cosines[1] < 1 - 1e-6  # the layers in front did step


def test_the_linear_task_can_be_learned_and_is_the_same_for_a_seed():
    x, y = next(ics.linear_batches(1))
    again = next(ics.linear_batches(1))
    assert torch.equal(torch.cat([x, y]), torch.cat(again))
    found = torch.linalg.lstsq(x, y)
    assert float((x @ found.solution - y).abs().max()) < 1e-3
