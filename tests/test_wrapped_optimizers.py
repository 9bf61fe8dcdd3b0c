"""Optimizers inside the wrappers of other packages and of training programs, wherever we take one."""

import importlib.util
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import batchnorm as bn
import peer_models
from batchnorm.errors import BatchNormError
from batchnorm.optim import unwrapped


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-2)


class Scheduled:
    """The annotated transformer's: no parameter groups of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class Hidden(Scheduled):
    """Under another name."""

    def __init__(self, optimizer):
        self._inner = optimizer

    @property
    def wrapped(self):
        return self._inner

    def zero_grad(self):
        self._inner.zero_grad()

    def step(self):
        self._inner.step()


@dataclass
class Engine:
    """Not hashable, with parameter groups that it forwards, as DeepSpeed's are."""

    optimizer: Any
    overflow: bool = False

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        if not self.overflow:
            self.optimizer.step()


class Deferred(torch.optim.Optimizer):
    """A subclass whose constructor does not run torch's: it has no dictionaries of hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class Slow(torch.optim.Optimizer):
    """As timm's Lookahead: dictionaries of hooks that its step does not run."""

    def __init__(self, optimizer):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._base_optimizer, self.state, self.defaults = optimizer, defaultdict(dict), {}
        self.param_groups = optimizer.param_groups

    def step(self):
        self._base_optimizer.step()


class Sharpness(torch.optim.Optimizer):
    """As SAM: an optimizer that is one, whose programs call ``second_step``."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        self.base_optimizer.step()


def accelerated(optimizer):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


def lightning(optimizer):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    peer_models.torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric.setup_optimizers(optimizer)


WRAPPERS = [
    Scheduled, Hidden, Engine, Deferred, Slow, Sharpness, accelerated, lightning, lambda o: Scheduled(Engine(o)),
    lambda o: Hidden(Deferred(o)), lambda o: Engine(Slow(o)),
]  # fmt: skip
NAMES = [getattr(w, "__name__", "") for w in WRAPPERS[:-3]] + ["Scheduled Engine", "Hidden Deferred", "Engine Slow"]
wrapped = pytest.mark.parametrize("wrap", WRAPPERS, ids=NAMES)


def train(model, optimizer, steps=3):
    for x in torch.randn(steps, 8, 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@wrapped
def test_the_inner_optimizer_is_found(wrap):
    inner = sgd(network())
    assert unwrapped(wrap(inner)) is inner


@wrapped
def test_monitor_counts_its_steps_and_finds_what_it_finds_without(wrap):
    model = network()
    inner = sgd(model)
    optimizer = wrap(inner)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
        with torch.no_grad():
            model(torch.randn(8, 3))
    assert run.step == 3
    assert not run.failed
    assert run.findings.codes == ("BN301",)
    assert not inner._optimizer_step_pre_hooks
    train(model, optimizer)
    assert run.step == 3


@wrapped
def test_watch_counts_its_steps_and_reads_its_learning_rate(wrap):
    model = network()
    optimizer = wrap(sgd(model))
    with bn.watch(model, optimizer, every=2) as seen:
        train(model, optimizer)
    assert seen.steps == 3
    assert not seen.failed
    assert {m.setting["step"] for m in seen.records.measurements} == {0, 2}
    assert any(m.quantity == "effective learning rate" for m in seen.records.measurements)


@wrapped
def test_check_fix_and_recipe(wrap):
    model = network()
    inner = sgd(model)
    optimizer = wrap(inner)
    train(model, optimizer)
    findings = bn.check(model, torch.randn(8, 3), optimizer=optimizer, select="BN102")
    assert findings.codes == ("BN102",)
    assert findings[0].numbers["optimizer"] == "SGD"
    fixed, _ = bn.fix(model, findings, optimizer=optimizer)
    assert not bn.check(fixed, torch.randn(8, 3), optimizer=optimizer, select="BN102")
    assert {id(p) for p in fixed.parameters()} == {id(p) for group in inner.param_groups for p in group["params"]}
    assert len(inner.state) == 6
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 30)
    changes = bn.recipe(optimizer, 5, scheduler=scheduler)
    assert inner.param_groups[0]["lr"] == 0.05
    assert [c.after for c in changes if c.path == "scheduler"] == [5]


@wrapped
def test_a_verb_takes_the_state_along(wrap):
    model = network()
    inner = sgd(model)
    optimizer = wrap(inner)
    train(model, optimizer)
    kept = inner.state[model[3].weight]["momentum_buffer"].clone()
    changed, _ = bn.drop_bias(model, torch.randn(8, 3), optimizer=optimizer)
    assert torch.equal(inner.state[changed[3].weight]["momentum_buffer"], kept)
    before = changed[0].weight.detach().clone()
    train(changed, optimizer, 1)
    assert not torch.equal(changed[0].weight, before)


class Own:
    """A class of its own: groups and a step, and nothing of torch's."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.01}]
        self.taken = 0

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.grad


@pytest.mark.parametrize("around", [lambda o: o, Engine, Hidden])
def test_an_optimizer_that_is_not_torchs(around):
    model = network()
    own = Own(model.parameters())
    optimizer = around(own)
    with bn.monitor(model, optimizer, warn=False) as run, bn.watch(model, optimizer, every=1) as seen:
        train(model, optimizer)
    assert (run.step, seen.steps, own.taken) == (3, 3, 3)
    assert "step" not in vars(own)
    train(model, optimizer)
    assert (run.step, seen.steps, own.taken) == (3, 3, 6)
    assert not bn.check(model, torch.randn(8, 3), optimizer=optimizer, select="BN102,BN202")
    changed, _ = bn.drop_bias(model, torch.randn(8, 3), optimizer=optimizer)
    assert any(p is changed[3].weight for p in own.param_groups[0]["params"])


def test_a_step_that_others_replace_meanwhile_is_left_to_them():
    model = network()
    own = Own(model.parameters())
    plain = own.step
    with bn.monitor(model, own, warn=False) as run:
        ours = own.step
        own.step = lambda: ours()
        theirs = own.step
        train(model, own, 2)
    assert run.step == 2
    assert own.step is theirs
    train(model, own, 1)
    assert (run.step, own.taken) == (2, 3)
    own.step = plain
    with bn.monitor(model, own, warn=False):
        pass
    assert own.step == plain


def test_several_by_name_and_one_given_twice():
    g, d = network(), network()
    of_g, of_d = sgd(g), sgd(d)
    with bn.monitor({"G": g, "D": d}, {"G": Scheduled(of_g), "D": of_d}, warn=False) as run:
        train(g, of_g, 1)
        train(d, of_d, 2)
    assert run.step == 3
    with bn.monitor(g, [of_g, Scheduled(of_g)], warn=False) as run:
        train(g, of_g, 1)
    assert run.step == 1


def test_a_schedule_of_a_wrapper():
    inner = sgd(network())
    around = Scheduled(inner)

    class Around:
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 30)

    assert [c.after for c in bn.recipe(around, 5, scheduler=Around()) if c.path == "scheduler"] == [5]


class Endless:
    @property
    def optimizer(self):
        return Endless()


class Round:
    def __init__(self):
        self.optimizer = self


class Two:
    """Of two optimizers inside, neither stands for the whole."""

    def __init__(self, *optimizers):
        self.first, self.second = optimizers


@pytest.mark.parametrize("make", [Endless, Round, lambda: Two(sgd(network()), sgd(network())), lambda: "sgd", object])
def test_what_contains_no_optimizer_is_refused_by_name(make):
    given = make()
    assert unwrapped(given) is given
    with pytest.raises(BatchNormError, match=r"monitor: optimizer is a \w+; give torch optimi"):
        bn.monitor(network(), given if given != "sgd" else [given])


def test_a_wrapper_of_another_models_optimizer_is_refused():
    with pytest.raises(BatchNormError, match="holds no parameter of this model"):
        bn.monitor(network(), Scheduled(sgd(network())))
