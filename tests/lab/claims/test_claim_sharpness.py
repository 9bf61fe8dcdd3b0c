import pytest
import torch
from rules import check_rule
from torch.func import functional_call

from batchnorm.lab.claims import sharpness
from batchnorm.lab.decayed import invariant
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.trainer import copy_losses


def results_of(kind):
    edge, last = {"confirmed": (2.0, 40.0), "refuted": (1.0, 40.0), "inconclusive": (2.0, 100.0)}[kind]
    spread = (-0.04, -0.02, 0.0, 0.02, 0.04)
    row = {
        "sharpness": [[0.5, 1.95, *[edge + each] * 5] for each in spread],
        "spherical": [[150.0, 100.0, 100.0, 100.0, *[last * (1 + each)] * 3] for each in spread],
        "loss": [[1.0, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3]] * 5,
    }
    return [{"at": list(range(1, 8)), **row}]


def test_the_rule_gives_every_verdict():
    check_rule(sharpness.CLAIM, results_of)


def test_the_power_method_finds_the_largest_eigenvalue_of_the_hessian():
    network = invariant(0, width=3, layers=1).double()
    stream = torch.Generator().manual_seed(0)
    x, labels = torch.randn(1, 12, 64, generator=stream).double(), torch.arange(12)[None] % 10
    stack = Copies([network])
    way = [torch.randn(p.shape, generator=stream, dtype=p.dtype) for p in stack.parameters]
    for _ in range(8):
        found, way = sharpness.sharpness(
            lambda: stack.gradients(copy_losses(stack.scores(x), labels)), stack.parameters, way
        )
    weight = network.linears[0].weight.detach()
    fixed = {name: p.detach() for name, p in network.named_parameters()}

    def loss(w):
        scores = functional_call(network, {**fixed, "linears.0.weight": w.view_as(weight)}, (x[0],))
        return torch.nn.functional.cross_entropy(scores, labels[0])

    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, weight.flatten()))
    assert float(found) == pytest.approx(float(exact[exact.abs().argmax()]), rel=1e-3)
    torch.testing.assert_close(stack.parameters[0][0], weight, atol=0, rtol=0)
