"""The three switches: which statistics normalise, whether they update, whether gamma and beta learn."""

import itertools

import numpy as np
import pytest
import torch
from layer_cases import OURS, example, randomise

import batchnorm as bn
from batchnorm import reference

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
SWITCHES = list(itertools.product(("auto", "batch", "running"), (None, True, False), (True, False)))


def expected_of(layer, x, residual, activation):
    """What reference.py says: the output with either statistics, and the buffers after an update."""
    mean, var = (t.double().numpy().copy() for t in (layer.running_mean, layer.running_var))
    weight, bias = (t.detach().double().numpy().copy() for t in (layer.weight, layer.bias))
    x, residual = x.double().numpy(), residual.double().numpy()
    common = {"gamma": weight, "beta": bias, "eps": layer.eps, "activation": activation, "residual": residual}
    batch = reference.batch_norm_forward(x, **common)
    running = reference.batch_norm_forward(x, **common, mu=mean, var=var)
    count = int(layer.num_batches_tracked) + 1
    moved = reference.update_running(mean, var, batch.mu, batch.var, batch.m, layer.momentum, count)
    return {"batch": batch.y, "running": running.y}, moved, (mean, var)


@pytest.mark.parametrize(("statistics", "update", "learn"), SWITCHES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.3, None])
@MODES
def test_every_combination_against_the_reference(statistics, update, learn, dims, momentum, mode, path):
    layer = OURS[dims](24, momentum=momentum, activation="relu", statistics=statistics, update=update)
    randomise(layer).learn = learn
    layer.train(not mode).train(mode)
    x, residual = example(dims), example(dims)
    outputs, moved, kept = expected_of(layer, x, residual, "relu")
    y = layer(x, residual=residual)

    normaliser = ("batch" if mode else "running") if statistics == "auto" else statistics
    updated = mode if update is None else update
    np.testing.assert_allclose(y.detach().double().numpy(), outputs[normaliser], rtol=1e-4, atol=1e-5)
    assert not np.allclose(outputs["batch"], outputs["running"], rtol=1e-2)
    for buffer, target in zip((layer.running_mean, layer.running_var), moved if updated else kept, strict=True):
        np.testing.assert_allclose(buffer.double().numpy(), target, rtol=1e-5, atol=1e-6)
    assert int(layer.num_batches_tracked) == int(updated)
    assert y.requires_grad == learn

    layer.train().eval().train(mode)
    assert (layer.statistics, layer.update, layer.learn) == (statistics, update, learn)


@pytest.mark.parametrize("statistics", ["batch", "running"])
@MODES
def test_gradients_follow_the_statistics_in_use(statistics, mode, path):
    layer = randomise(bn.BatchNorm2d(24, statistics=statistics, update=True, activation="silu")).train(mode)
    x = example(2).requires_grad_()
    given = {}
    if statistics == "running":
        given = {"mu": layer.running_mean.double().numpy().copy(), "var": layer.running_var.double().numpy().copy()}
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected = reference.batch_norm_backward(
        dy.double().numpy(),
        x.detach().double().numpy(),
        gamma=layer.weight.detach().double().numpy(),
        beta=layer.bias.detach().double().numpy(),
        activation="silu",
        **given,
    )
    for actual, target in (
        (x.grad, expected.dx),
        (layer.weight.grad, expected.dgamma),
        (layer.bias.grad, expected.dbeta),
    ):
        np.testing.assert_allclose(actual.double().numpy(), target, rtol=1e-4, atol=1e-4 * np.abs(target).max())


def test_statistics_move_between_forward_and_backward(path):
    """Running statistics that normalise and move in one step: the gradient is of those that normalised."""
    layer = randomise(bn.BatchNorm2d(24, statistics="running", update=True))
    x = example(2).requires_grad_()
    expected = (layer.weight / (layer.running_var + layer.eps).sqrt()).detach()
    y = layer(x)
    layer(example(2) * 5)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, expected.reshape(1, -1, 1, 1).expand_as(dx), rtol=1e-5, atol=1e-6)


def test_a_new_average_counts_from_its_own_batches(path):
    """Batches that were not used to update do not count in momentum=None."""
    layer = bn.BatchNorm2d(24, momentum=None)
    first, second, third = example(2), example(2), example(2)
    layer(first)
    layer.update = False
    layer(second)
    layer.update = None
    layer(third)
    mean = torch.stack([t.mean((0, 2, 3)) for t in (first, third)]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-4, atol=1e-5)
    assert int(layer.num_batches_tracked) == 2


def test_learn(path):
    layer = bn.BatchNorm2d(24)
    assert layer.learn
    layer.learn = False
    assert not layer.weight.requires_grad
    assert not layer.bias.requires_grad
    assert not layer.train().learn
    x = example(2).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    layer.eval().learn = True
    assert layer.weight.requires_grad
    assert layer.bias.requires_grad
    layer.weight.requires_grad_(False)
    assert layer.learn  # beta still does


def test_learn_without_parameters():
    layer = bn.BatchNorm2d(24, affine=False)
    layer.learn = True
    assert not layer.learn
    half = bn.BatchNorm2d(24)
    half.bias = None  # as bias=False does from torch 2.13 on
    half.learn = False
    assert not half.weight.requires_grad


def test_without_buffers_there_is_nothing_to_update(path):
    layer = bn.BatchNorm2d(24, track_running_stats=False, update=True)
    stock = torch.nn.BatchNorm2d(24, track_running_stats=False)
    x = example(2)
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(x), stock.train(mode)(x), rtol=1e-4, atol=1e-5)


def test_update_overrules_track_running_stats(path):
    layer = bn.BatchNorm2d(24, update=True)
    layer.track_running_stats = False
    layer(example(2))
    assert int(layer.num_batches_tracked) == 1
    layer.update = None
    layer(example(2))
    assert int(layer.num_batches_tracked) == 1


# ---- Modules of several batch norms ------------------------------------------------------------------------

SEVERAL = {
    "domain": lambda **options: bn.DomainBatchNorm(4, domains=("a", "b"), affine="separate", **options),
    "lstm": lambda **options: bn.BatchNormLSTM(4, 4, num_layers=2, **options),
    "gru": lambda **options: bn.BatchNormGRU(4, 4, bidirectional=True, **options),
    "lstm cell": lambda **options: bn.BatchNormLSTMCell(4, 4, **options),
    "gru cell": lambda **options: bn.BatchNormGRUCell(4, 4, **options),
}


def inside(module):
    return [layer for layer in module.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_switch_of_the_whole_is_one_of_every_part(kind):
    module = SEVERAL[kind]()
    assert (module.statistics, module.update, module.learn) == ("auto", None, True)
    module.statistics, module.update, module.learn = "running", False, False
    module.train()
    assert len(inside(module)) > 1
    for layer in inside(module):
        assert (layer.statistics, layer.update, layer.learn) == ("running", False, False)
    assert (module.statistics, module.update, module.learn) == ("running", False, False)
    assert SEVERAL[kind](statistics="batch", update=True).statistics == "batch"


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_whole_s_update_holds_the_statistics(kind):
    module, x = SEVERAL[kind](), torch.randn(5, 6, 4)
    module.update = False
    module(x)
    assert all(not layer.num_batches_tracked.any() for layer in inside(module))
    module.update = None
    module(x)
    assert all(layer.num_batches_tracked.any() for layer in inside(module))


def test_parts_that_differ_are_told():
    module = SEVERAL["domain"]()
    module.layer_of("b").update = True
    with pytest.raises(bn.BatchNormError, match="update is None in domain_a, True in domain_b"):
        _ = module.update
    module.update = False
    assert module.update is False
