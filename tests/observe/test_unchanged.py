"""Looking changes nothing: training with and without it is the same, bit by bit, and afterwards no trace is left."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from watching import Functional, batches, convolutional, hooks_of, sgd, stack, train

import batchnorm as bn

MODELS = {
    "torch": (convolutional, (8, 1, 6, 6)),
    "ours": (lambda: convolutional(bn.BatchNorm2d), (8, 1, 6, 6)),
    "functional": (Functional, (8, 6)),
    "fused": (lambda: nn.Sequential(nn.Linear(6, 6), bn.BatchNorm1d(6, activation="relu"), nn.Linear(6, 3)), (8, 6)),
}


def random_states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def same_states(a, b):
    return torch.equal(a[0], b[0]) and a[1] == b[1] and all(map(np.array_equal, a[2], b[2]))


def trained(make, shape, to=None, adam=False, **options):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adam else sgd(model)
    losses = []
    if options:
        with bn.watch(model, to=to, **options) as seen:
            train(model, optimizer, batches(7, shape), lambda loss: (losses.append(loss.item()), seen.log("l", loss)))
        assert seen.failed == {}
        assert len(seen.records.measurements) > 20
    else:
        train(model, optimizer, batches(7, shape), lambda loss: losses.append(loss.item()))
    return model, optimizer, losses, random_states()


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("every", [1, 3])
def test_training_is_the_same_bit_by_bit(name, every, tmp_path):
    make, shape = MODELS[name]
    model, optimizer, losses, states = trained(make, shape, adam=every == 1)
    other, its, seen_losses, seen_states = trained(make, shape, tmp_path / "run.jsonl", every == 1, every=every)
    assert losses == seen_losses
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict(), its.state_dict())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert same_states(states, seen_states)
    assert [m.training for m in model.modules()] == [m.training for m in other.modules()]
    assert hooks_of(other) == 0
    assert [sorted(vars(m)) for m in model.modules()] == [sorted(vars(m)) for m in other.modules()]


def test_large_signals_are_sampled_without_random_numbers():
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(16, 1, 32, 32)
    states = random_states()
    with bn.watch(model) as seen:
        model(x).sum().backward()
    assert same_states(states, random_states())
    assert sum(seen.records.measurements[0].samples) == 16384


@pytest.mark.parametrize("where", ["in the loop", "in the forward", "in the backward"])
def test_after_an_exception_nothing_is_left(where, tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "in the forward":
                raise KeyboardInterrupt
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyboardInterrupt

    model = stack()
    model[1].eval()
    model[4].eval()
    model[1].register_forward_hook(lambda *_: None)
    optimizer = sgd(model)
    modes, hooks, own = [m.training for m in model.modules()], hooks_of(model), copy.deepcopy(model.state_dict())
    x = batches(1)[0][0]
    with pytest.raises(KeyboardInterrupt), bn.watch(model, every=1, to=tmp_path / "run.jsonl") as seen:  # noqa: PT012
        if where == "in the loop":
            raise KeyboardInterrupt
        Fails.apply(model(x)).sum().backward()
    assert not seen.running
    assert len(seen.records.measurements) == (0 if where == "in the loop" else 28)
    assert hooks_of(model) == hooks
    assert [m.training for m in model.modules()] == modes
    assert equal(own, model.state_dict())
    assert not optimizer._optimizer_step_pre_hooks
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_an_optimiser_keeps_none_of_our_hooks():
    model = stack()
    optimizer = sgd(model)
    with bn.watch(model, optimizer):
        assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_no_signal_is_kept_alive():
    import gc
    import weakref

    kept = []
    model = stack()
    model[0].register_forward_hook(lambda module, given, made: kept.append(weakref.ref(made)))
    with bn.watch(model, every=1):
        model(batches(1)[0][0])
        model[0](batches(1)[0][0])
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
    kept.clear()
    with bn.watch(model, every=1):
        model[0](batches(1)[0][0])
        gc.collect()
        assert kept[0]() is None
