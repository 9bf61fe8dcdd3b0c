"""The context managers put everything back, exceptions included."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.preserve import attributes, buffers, hooks, modes, random_states, untouched

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Stop(Exception):
    pass


def leave(manager, work, fails):
    """Do some work under a manager, and leave it in an orderly way or not."""
    if not fails:
        with manager:
            work()
        return
    with pytest.raises(Stop), manager:
        stop_after(work)


def stop_after(work):
    work()
    raise Stop


both = pytest.mark.parametrize("fails", [False, True])


@both
def test_buffers_keep_their_numbers_and_their_identity(fails):
    layer = nn.BatchNorm1d(3)
    mean, number = layer.running_mean, layer.num_batches_tracked
    mean.copy_(torch.tensor([1.0, float("nan"), 3.0]))

    def work():
        layer(X)
        layer.running_var = torch.full((3,), 9.0)
        layer.register_buffer("added", torch.ones(1))
        del layer.num_batches_tracked

    leave(buffers(layer), work, fails)
    assert layer.running_mean is mean
    assert layer.num_batches_tracked is number
    assert list(layer._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert torch.equal(mean.nan_to_num(7.0), torch.tensor([1.0, 7.0, 3.0]))
    assert torch.equal(layer.running_var, torch.ones(3))
    assert int(number) == 0


def test_buffers_that_did_not_change_are_not_written_to():
    layer = nn.BatchNorm1d(3).eval()
    layer.running_mean[0] = float("nan")
    versions = [b._version for b in layer.buffers()]
    y = layer(X.clone().requires_grad_())  # waits for its backward pass
    with untouched(layer):
        layer(X)
    assert [b._version for b in layer.buffers()] == versions
    y.nan_to_num().sum().backward()


def test_buffers_made_in_inference_mode():
    with torch.inference_mode():
        layer = nn.BatchNorm1d(3)
    with untouched(layer), torch.inference_mode():
        layer(X)
    assert torch.equal(layer.running_mean, torch.zeros(3))


@both
def test_modes(fails):
    model = nn.Sequential(nn.Dropout().eval(), nn.Sequential(nn.ReLU()))
    leave(modes(model), model.eval, fails)
    assert [m.training for m in model.modules()] == [True, False, True, True]


@both
def test_hooks(fails):
    layer = nn.Linear(3, 3)
    kept = layer.register_forward_hook(lambda *a: None)

    def work():
        kept.remove()
        layer.register_forward_hook(lambda *a: None, with_kwargs=True, always_call=True)
        layer.register_forward_pre_hook(lambda *a: None)
        layer.register_full_backward_hook(lambda *a: None)

    leave(hooks(layer), work, fails)
    assert list(layer._forward_hooks) == [kept.id]
    assert not layer._forward_hooks_with_kwargs
    assert not layer._forward_hooks_always_called
    assert not layer._forward_pre_hooks
    assert not layer._backward_hooks


@both
def test_random_states(fails):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = draw()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    leave(random_states(), draw, fails)
    assert draw() == expected


@both
def test_attributes_parameters_and_submodules(fails):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.count, model.table = 0, torch.zeros(2)
    weight, table = model[0].weight, model.table
    numbers = weight.detach().clone()

    def work():
        model.count += 1
        model.new = 1
        model.table += 1
        model[0].weight.data = torch.zeros(3, 3)  # as layers with a norm constraint do
        model[0].bias = None
        model[1] = nn.Tanh()
        model.extra = nn.Tanh()

    leave(attributes(model), work, fails)
    assert model.count == 0
    assert not hasattr(model, "new")
    assert not hasattr(model, "extra")
    assert model.table is table
    assert torch.equal(table, torch.zeros(2))
    assert model[0].weight is weight
    assert torch.equal(weight, numbers)
    assert model[0].bias is not None
    assert isinstance(model[1], nn.ReLU)


@both
def test_a_whole_model(fails):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()

    def work():
        model.register_forward_hook(lambda *a: None)
        model(X)
        model.eval()

    leave(untouched(model), work, fails)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


def test_scripted_modules_pass_through():
    scripted = torch.jit.script(nn.BatchNorm1d(3))
    with untouched(nn.Sequential(scripted)):
        scripted(X)
    assert torch.equal(scripted.running_mean, torch.zeros(3))


class Returnless(nn.Sequential):
    """Sets modes in a train() of its own, which returns nothing; eval() then returns nothing either."""

    def train(self, mode=True):
        super().train(mode)


def test_a_model_whose_train_returns_nothing_can_be_checked_and_transformed():
    torch.manual_seed(0)
    model = Returnless(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    assert model.eval() is None
    findings = bn.check(model, data=torch.randn(24, 3).split(8))
    assert not findings.failed
    assert {"BN101", "BN202"} <= set(findings.codes)
    y = model(X)
    for changed in (bn.drop_bias(model, X)[0], bn.fold(model, X)[0], bn.fix(model, findings)[0]):
        torch.testing.assert_close(changed(X), y)


class Follower(nn.Module):
    """A momentum encoder: calling the model moves the second network, whichever way its author writes that."""

    def __init__(self, follow):
        super().__init__()
        self.leader, self.second, self.follow = nn.Linear(3, 3), nn.Linear(3, 3), follow
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        for mine, theirs in zip(self.second.parameters(), self.leader.parameters(), strict=True):
            self.follow(mine, theirs.detach())
        return self.norm(self.leader(x) - self.second(x))


FOLLOW = {
    "in place": lambda mine, theirs: mine.data.mul_(0.9).add_(theirs, alpha=0.1),
    "a new tensor": lambda mine, theirs: setattr(mine, "data", 0.9 * mine.data + 0.1 * theirs),
}


@pytest.mark.parametrize("look", [bn.trace, bn.check, lambda model, x: bn.check(model, x, data=[x, x])])
@pytest.mark.parametrize("follow", FOLLOW.values(), ids=FOLLOW)
def test_a_model_that_changes_itself_is_left_as_it_was(follow, look):
    torch.manual_seed(0)
    model, x = Follower(follow), torch.randn(8, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    look(model, x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    model(x)
    assert not torch.equal(before["second.weight"], model.second.weight)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.matrix = nn.BatchNorm1d(3), nn.Parameter(torch.eye(3).to_sparse())

    def forward(self, x):
        return self.norm(torch.sparse.mm(self.matrix, x.t()).t())


def test_sparse_parameters_are_no_obstacle():
    assert not bn.check(Sparse()).failed
    assert [call.name for call in bn.trace(Sparse(), X).calls][-1] == "norm"
    assert not bn.check(Sparse(), X)
