"""Virtual batches: each is normalised as a batch of its own, and the remainder makes none of them small."""

import sys

import pytest
import torch
from layer_cases import LAST, same
from torch.nn import functional as F

import batchnorm as bn
from batchnorm.kernels.fallback import counts


@pytest.mark.parametrize(("samples", "size", "groups"), [(70, 32, 2), (64, 32, 2), (31, 32, 1), (9, 2, 4), (8, 3, 2)])
@pytest.mark.parametrize("shape", [(20,), (20, 7), (17, 2, 3)], ids=str)
def test_each_virtual_batch_is_a_batch(samples, size, groups, shape, path):
    x = torch.randn(samples, *shape, requires_grad=True)
    layer = bn.GhostBatchNorm(shape[0], size)
    y = layer(x)
    sizes = [(g + 1) * samples // groups - g * samples // groups for g in range(groups)]
    assert min(sizes) >= min(size, samples)
    assert counts(x.flatten(2).sum(2) if x.dim() > 2 else x, None, groups).tolist() == sizes
    leaf = x.detach().clone().requires_grad_()
    expected = torch.cat([F.batch_norm(part, None, None, training=True) for part in leaf.split(sizes)])
    same(y, expected, 1e-5)
    dy = torch.randn_like(x)
    same(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, leaf, dy)[0], 1e-4)


def test_shared_parameters_gather_from_all_groups(path):
    layer, x = bn.GhostBatchNorm(20, 3, activation="silu"), torch.randn(9, 20, 5)
    torch.nn.init.uniform_(layer.weight, 0.5, 2.0), torch.nn.init.normal_(layer.bias)
    dy = torch.randn_like(x)
    actual = torch.autograd.grad(layer(x), list(layer.parameters()), dy)
    parts = [F.silu(F.batch_norm(part, None, None, layer.weight, layer.bias, True)) for part in x.split(3)]
    for a, e in zip(actual, torch.autograd.grad(torch.cat(parts), list(layer.parameters()), dy), strict=True):
        same(a, e, 1e-4)


def test_channels_last_is_grouped_by_sample(path):
    layer, x = bn.GhostBatchNorm(20, 2), torch.randn(6, 20, 3, 5)
    same(layer(x.contiguous(memory_format=LAST[2])), layer(x), 1e-6)


def test_one_virtual_batch_is_batch_norm(path):
    ghost, plain, x = bn.GhostBatchNorm(20, 32), bn.BatchNorm1d(20), torch.randn(40, 20, 5)
    assert torch.equal(ghost(x), plain(x))
    assert torch.equal(ghost.running_var, plain.running_var)


@pytest.mark.parametrize("size", [0, -3, 2.0, True, "32", None])
def test_wrong_sizes(size):
    with pytest.raises(bn.BatchNormError, match=r"GhostBatchNorm: virtual_batch_size is .*; use a whole number from 1"):
        bn.GhostBatchNorm(20, size)


def test_groups_of_one_value(path):
    with pytest.raises(bn.BatchNormError, match="8 samples in 8 groups leave a group with 1; use fewer groups"):
        bn.GhostBatchNorm(20, 1)(torch.randn(8, 20))
    y = bn.GhostBatchNorm(20, 1)(torch.randn(8, 20, 40))  # with positions, that is instance norm
    assert y.mean(2).abs().max() < 1e-5


@pytest.mark.parametrize("layer", [bn.GhostBatchNorm(20, 4), bn.GhostBatchNorm(20, 4, activation="relu")], ids=str)
def test_there_is_no_loop_over_virtual_batches(layer, path):
    """However many there are, as many functions are called, forward and backward."""

    def calls(groups):
        x = torch.randn(4 * groups, 20, requires_grad=True)
        dy = torch.randn(4 * groups, 20)
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            y = layer(x)
            y.backward(dy)
        finally:
            sys.setprofile(None)
        return count

    calls(2)  # what is done once
    assert calls(100) == calls(2)
