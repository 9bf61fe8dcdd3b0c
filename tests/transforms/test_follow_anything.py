"""Optimizers that keep parameters in more places than their groups and their state follow a verb, too."""

import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn

import batchnorm as bn

BATCHES = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1)).double().split(8)
X = BATCHES[0]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ).double()


VERBS = {
    "calibrate": lambda m, o: bn.calibrate(m, BATCHES, optimizer=o),
    "adapt": lambda m, o: bn.adapt(m, BATCHES, optimizer=o),
    "freeze": lambda m, o: bn.freeze(m, optimizer=o),
    "unfreeze": lambda m, o: bn.unfreeze(m, optimizer=o),
    "fuse": lambda m, o: bn.fuse(m, X, optimizer=o),
    "accelerate": lambda m, o: bn.accelerate(m, X, steps=2, seconds=0, optimizer=o),
    "drop_bias": lambda m, o: bn.drop_bias(m, X, optimizer=o),  # these change how many parameters there are
    "insert": lambda m, o: bn.insert(m, X, ["3"], optimizer=o),
    "convert": lambda m, o: bn.convert(m, "none", data=BATCHES, optimizer=o),
    "fix": lambda m, o: bn.fix(m, bn.check(m, X, select="BN101"), optimizer=o),
}
SAME = ("calibrate", "unfreeze", "fuse", "accelerate")  # training goes on as it would have


class Lookahead(torch.optim.Optimizer):
    """A wrapper with a state of its own: slow weights, made when it is."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, defaultdict(dict)
        for p in optimizer.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.optimizer.step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"].lerp_(p, 0.5)
            p.copy_(self.state[p]["slow"])


class Listed:
    """A class of its own, with a list, a tuple and a dictionary of parameters."""

    def __init__(self, parameters):
        self.all = list(parameters)
        self.pairs = [(p, 0.05) for p in self.all]
        self.velocity = {p: torch.zeros_like(p) for p in self.all}
        self.param_groups = [{"params": list(self.all), "lr": 0.05}]

    def zero_grad(self):
        for p in self.all:
            p.grad = None

    def step(self, closure):
        closure()
        with torch.no_grad():
            for p, rate in self.pairs:
                if p.grad is not None:
                    self.velocity[p].mul_(0.9).add_(p.grad)
                    p.sub_(rate * self.velocity[p])


def lbfgs(model, **options):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


MAKES = {
    "LBFGS": lbfgs,
    "LBFGS with line search": lambda m: lbfgs(m, line_search_fn="strong_wolfe"),
    "Lookahead": lambda m: Lookahead(sgd(m)),
    "Listed": lambda m: Listed(m.parameters()),
}


def train(model, optimizer, steps=2):
    def closure():
        optimizer.zero_grad()
        loss = model.train()(X).square().mean()
        with torch.enable_grad():
            loss.backward()
        return loss

    for _ in range(steps):
        with torch.enable_grad():
            optimizer.step(closure)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("make", MAKES)
def test_the_copy_trains_and_the_argument_does_not(make, verb):
    if verb == "insert" and make in ("Lookahead", "Listed"):
        pytest.skip("it cannot learn of new parameters")
    model, twin = network(), network()
    optimizer, other = MAKES[make](model), MAKES[make](twin)
    train(model, optimizer)
    train(twin, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bn.BatchNormWarning)
        changed, _ = VERBS[verb](model, optimizer)
        learns = {name: p for name, p in changed.named_parameters() if p.requires_grad and name != "0.bias"}
        before = {name: p.detach().clone() for name, p in learns.items()}
        old = [p.detach().clone() for p in model.parameters()]
        train(changed, optimizer)
    assert [name for name, p in learns.items() if torch.equal(p, before[name])] == []
    assert all(map(torch.equal, model.parameters(), old))
    if verb in SAME:
        train(twin, other)
        torch.testing.assert_close(dict(changed.named_parameters()), dict(twin.named_parameters()), rtol=0, atol=1e-12)
    if make.startswith("LBFGS"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_repair_that_raises_leaves_the_optimizer_as_it_was(monkeypatch):
    from batchnorm.doctor import fix as home

    def broken(*_):
        raise RuntimeError("broken")

    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    train(model, optimizer)
    state = dict(optimizer.state[model[0].weight])
    findings = bn.check(model, X, select="BN101")
    monkeypatch.setattr(home, "_certify", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bn.fix(model, findings, optimizer=optimizer)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert optimizer._params is optimizer.param_groups[0]["params"]
    assert optimizer.state[model[0].weight] == state
    before = model[0].weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(model[0].weight, before)
