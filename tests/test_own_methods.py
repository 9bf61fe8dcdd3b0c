"""Models that define methods of `nn.Module` themselves, with fewer arguments and lists in the place of iterators."""

import pytest
import torch
from torch import nn

import batchnorm as bn


class Own(nn.Sequential):
    """The methods have the signatures of older versions of torch, or none at all."""

    def parameters(self):
        return list(super().parameters())

    def named_parameters(self, prefix="", recurse=True):
        return list(super().named_parameters(prefix, recurse))

    def buffers(self):
        return list(super().buffers())

    def named_buffers(self, prefix="", recurse=True):
        return list(super().named_buffers(prefix, recurse))

    def children(self):
        return list(super().children())

    def modules(self):
        return list(super().modules())

    def zero_grad(self):
        super().zero_grad()


def layers():
    torch.manual_seed(0)
    return [
        *(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU()),
        *(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)),
    ]


MODELS = {"whole": lambda: Own(*layers()), "part": lambda: nn.Sequential(Own(*layers()[:3]), *layers()[3:])}
X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))


def trained(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def monitored(model, optimizer):
    with bn.monitor(model, optimizer, warn=False) as run:
        trained(model, optimizer)
    assert not run.failed


def watched(model, optimizer):
    with bn.watch(model, optimizer, every=1) as run:
        trained(model, optimizer)
    assert {"gradient", "weight"} <= {m.quantity.split()[0] for m in run.records.measurements}


def checked(model, optimizer):
    findings = bn.check(model, data=X.split(8), optimizer=optimizer)
    assert not findings.failed
    assert "BN101" in findings.codes
    bn.fix(model, findings, unsafe=True)


VERBS = {
    "monitor": monitored,
    "watch": watched,
    "check": checked,
    "calibrate": lambda model, optimizer: bn.calibrate(model, X.split(8), progress=False),
    "fold": lambda model, optimizer: bn.fold(model.eval(), X),
    "fuse": lambda model, optimizer: bn.fuse(model, X, optimizer=optimizer),
    "drop_bias": lambda model, optimizer: bn.drop_bias(model, X, optimizer=optimizer),
    "insert": lambda model, optimizer: bn.insert(nn.Sequential(model, nn.ReLU(), nn.Linear(2, 2)), X),
    "freeze": lambda model, optimizer: bn.freeze(model, optimizer=optimizer),
    "convert": lambda model, optimizer: bn.convert(model, "group", optimizer=optimizer),
    "adapt": lambda model, optimizer: bn.adapt(model, X.split(8)),
    "param_groups": lambda model, optimizer: bn.param_groups(model, 1e-4),
    "trace": lambda model, optimizer: bn.trace(model, X),
}


@pytest.mark.filterwarnings("ignore::batchnorm.BatchNormWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("verb", VERBS)
def test_methods_of_the_model_s_own(verb, kind):
    model = MODELS[kind]()
    VERBS[verb](model, torch.optim.SGD(list(model.parameters()), lr=0.1, weight_decay=0.01))
