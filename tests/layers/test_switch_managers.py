"""``no_update`` and ``use_batch_statistics`` turn a model's switches, and put them back."""

import copy

import pytest
import torch
from layer_cases import OURS, STOCK, example, pair, randomise, same
from torch import nn

import batchnorm as bn

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
CLASSES = pytest.mark.parametrize("cls", [nn.BatchNorm2d, bn.BatchNorm2d], ids=["stock", "ours"])
MANAGERS = pytest.mark.parametrize("manager", [bn.no_update, bn.use_batch_statistics])


def switches_of(model):
    names = ("training", "track_running_stats", "statistics", "update", "momentum", "activation")
    return [{name: getattr(m, name, "absent") for name in names} for m in model.modules()]


def model_of(cls):
    """A network in which one layer stands twice, and another is in another mode than the rest."""
    shared = randomise(cls(24))
    other = randomise(cls(24)).eval()
    return nn.Sequential(shared, nn.Sequential(nn.ReLU(), other), shared)


def buffers_of(model):
    return [b.clone() for b in model.buffers()]


@CLASSES
@MODES
def test_no_update_moves_nothing_and_changes_no_output(cls, mode, path):
    model = model_of(cls)
    model[0].train(mode)
    twin, before = copy.deepcopy(model), buffers_of(model)
    x = example(2)
    with bn.no_update(model) as inside:
        assert inside is model
        same(model(x), twin(x))
    for buffer, old in zip(model.buffers(), before, strict=True):
        assert torch.equal(buffer, old)
    model(x)
    assert int(model[0].num_batches_tracked) == (2 if mode else 0)


@CLASSES
@MODES
def test_use_batch_statistics_normalises_with_the_batch(cls, mode, path):
    layer = randomise(cls(24)).train(mode)
    x = example(2)
    expected = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, training=True)
    before = buffers_of(layer)
    with bn.use_batch_statistics(layer):
        same(layer(x), expected)
        assert layer.training is (mode or cls is nn.BatchNorm2d)
    moved = [not torch.equal(buffer, old) for buffer, old in zip(layer.buffers(), before, strict=True)]
    assert moved == [mode] * 3  # what is updated does not change
    assert layer.training is mode


@CLASSES
@MANAGERS
@MODES
def test_switches_are_put_back(cls, manager, mode):
    model = model_of(cls)
    model.train(mode)
    model[1][1].train(not mode)
    before = switches_of(model)
    with manager(model):
        assert switches_of(model) != before or (manager is bn.use_batch_statistics and cls is nn.BatchNorm2d)
    assert switches_of(model) == before
    assert set(vars(model[0])) == set(vars(model_of(cls)[0]))


@CLASSES
@MANAGERS
def test_switches_are_put_back_after_an_exception(cls, manager):
    model = model_of(cls)
    before = switches_of(model)
    with pytest.raises(ZeroDivisionError), manager(model):
        _ = 1 / 0
    assert switches_of(model) == before


@CLASSES
def test_switches_set_by_hand_come_back(cls):
    layer = cls(24)
    if cls is bn.BatchNorm2d:
        layer.update, layer.statistics = True, "running"
    else:
        layer.track_running_stats = False
    before = switches_of(layer)
    with bn.no_update(layer), bn.use_batch_statistics(layer):
        pass
    assert switches_of(layer) == before


@CLASSES
@MODES
def test_nested(cls, mode, path):
    model = model_of(cls).train(mode)
    before, buffers = switches_of(model), buffers_of(model)
    x = example(2)
    with bn.no_update(model):
        with bn.use_batch_statistics(model):
            inner = model(x)
            with bn.no_update(model[0]):
                same(model(x), inner)
        outer = model(x)
        with bn.no_update(model):
            pass
        model(x)  # an inner manager of the same kind must not end the outer one
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, old)
    assert switches_of(model) == before
    if not mode:
        assert not torch.allclose(inner, outer)


def test_both_kinds_in_one_model(path):
    stock, ours = pair(2)
    model = nn.Sequential(stock, ours, OURS[2](24, track_running_stats=False), STOCK[2](24, affine=False))
    buffers = buffers_of(model)
    with bn.no_update(model):
        model(example(2))
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, old)


def test_train_inside_does_not_undo_our_switches(path):
    layer = bn.BatchNorm2d(24)
    with bn.no_update(layer):
        layer.eval()
        layer.train()
        layer(example(2))
    assert int(layer.num_batches_tracked) == 0
    with bn.use_batch_statistics(layer):
        layer.eval()
        assert layer(example(2) + 100).detach().mean().abs() < 1e-3


def test_other_layers_are_left_alone():
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.Dropout(), nn.GroupNorm(1, 3)).eval()
    before = [dict(vars(m)) for m in model]
    for manager in (bn.no_update, bn.use_batch_statistics):
        with manager(model):
            assert [dict(vars(m)) for m in model] == before


def test_gradients_flow_inside(path):
    layer, x = bn.BatchNorm2d(24), example(2).requires_grad_()
    with bn.no_update(layer):
        layer(x).pow(3).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0


class Ignoring(nn.BatchNorm2d):
    """A norm whose own forward reads neither `track_running_stats` nor our switches."""

    def forward(self, x):
        args = (self.running_mean, self.running_var, self.weight, self.bias)
        return nn.functional.batch_norm(x, *args, self.training)


class IgnoringOurs(bn.BatchNorm2d):
    forward = Ignoring.forward


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: Ignoring(3),
        lambda: IgnoringOurs(3),
        lambda: bn.convert(Ignoring(3), "sync")[0],
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        lambda: bn.freeze(Ignoring(3))[0],
    ],
    ids=["own forward", "own forward, ours", "synchronised", "instance norm", "frozen"],
)
def test_norms_with_a_forward_of_their_own(layer, training):
    torch.manual_seed(0)
    layer = layer()
    model = nn.Sequential(layer).train(training)
    x = torch.randn(6, 3, 4, 4) * 3 + 2
    before, hooks = {n: t.clone() for n, t in layer.named_buffers()}, len(layer._forward_hooks)
    buffers = list(layer.buffers())
    frozen = "Frozen" in type(layer).__name__
    dims = (2, 3) if isinstance(layer, nn.InstanceNorm2d) else (0, 2, 3)
    batch = (x - x.mean(dims, keepdim=True)) / (x.var(dims, correction=0, keepdim=True) + 1e-5).sqrt()
    with bn.no_update(model), bn.no_update(model):
        for _ in range(2):
            y = model(x)
    torch.testing.assert_close(y, batch if training and not frozen else x / (1 + 1e-5) ** 0.5, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in layer.named_buffers())
    with pytest.raises((RuntimeError, ValueError)), bn.no_update(model):
        model(x[:, :2])
    with bn.use_batch_statistics(model):
        torch.testing.assert_close(model(x), batch, rtol=1e-4, atol=1e-4)
        assert training or all(torch.equal(t, before[n]) for n, t in layer.named_buffers())
    moved = not all(torch.equal(t, before[n]) for n, t in layer.named_buffers())
    assert moved is (training and not frozen)
    assert all(a is b for a, b in zip(buffers, layer.buffers(), strict=True))
    assert layer.training is training
    assert len(layer._forward_hooks) == hooks
