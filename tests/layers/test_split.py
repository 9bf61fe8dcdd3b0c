"""Parts of a batch that do not see each other, in the samples' order or dealt out at random."""

import pytest
import torch
from layer_cases import LAST, same
from torch.nn import functional as F

import batchnorm as bn


def test_two_views_stay_apart(path):
    layer = bn.SplitBatchNorm(20, update=False)
    one, other = torch.randn(8, 20, 5), torch.randn(8, 20, 5) + 5
    y = layer(torch.cat([one, other]))
    assert torch.equal(layer(torch.cat([one, other * 3 - 1]))[:8], y[:8])
    same(y[8:], F.batch_norm(other, None, None, training=True), 1e-5)


def ordered(seed, n):
    torch.manual_seed(seed)
    return torch.rand(n).argsort()


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_shuffled_is_split_in_another_order(splits, path):
    """Outputs, gradients and the residual come back where they belong; a mask goes with its samples."""
    shuffled, split = (bn.SplitBatchNorm(20, splits, shuffle=s, activation="relu", update=False) for s in (True, False))
    x, residual, dy = torch.randn(3, 9, 20, 18).unbind()
    lengths = torch.arange(3, 12)
    order = ordered(7, 9)
    assert not torch.equal(order, torch.arange(9))
    for mask in (None, lengths, torch.arange(18) < lengths[:, None]):
        leaves = [t.clone().requires_grad_() for t in (x, residual)]
        torch.manual_seed(7)
        y = shuffled(leaves[0], leaves[1], mask)
        actual = [y, *torch.autograd.grad(y, leaves, dy)]
        leaves = [t[order].requires_grad_() for t in (x, residual)]
        z = split(leaves[0], leaves[1], None if mask is None else mask[order])
        expected = [z, *torch.autograd.grad(z, leaves, dy[order])]
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a[order], e)


def test_the_samples_are_really_mixed(path):
    """Which samples share statistics changes from pass to pass, and pairs are not kept together."""
    layer = bn.SplitBatchNorm(20, shuffle=True, update=False)
    x = torch.randn(8, 20, 5)
    x[4:] += 100
    outputs = [layer(x) for _ in range(6)]
    assert any(not torch.equal(outputs[0], y) for y in outputs[1:])
    # Apart, no output tells which half it comes from: mixed, the halves lie apart. Of 35 ways one keeps them so.
    assert sum(bool(y[4:].mean() > 0.5) for y in outputs) >= 5


def test_shuffling_follows_the_seed_and_not_evaluation(path):
    layer, x = bn.SplitBatchNorm(20, shuffle=True), torch.randn(8, 20, 5)
    before = torch.get_rng_state()
    layer.eval()(x)
    assert torch.equal(torch.get_rng_state(), before)
    layer.train()
    torch.manual_seed(4)
    first = layer(x)
    torch.manual_seed(4)
    assert torch.equal(layer(x), first)


def test_shuffling_keeps_the_layout(path):
    layer = bn.SplitBatchNorm(20, shuffle=True)
    x = torch.randn(6, 20, 3, 5).contiguous(memory_format=LAST[2])
    assert layer(x).is_contiguous(memory_format=LAST[2])


def test_uneven_parts(path):
    layer, x = bn.SplitBatchNorm(20, 3), torch.randn(8, 20, 5)
    y = layer(x)
    assert [y[a:b].mean().abs().max() < 1e-5 for a, b in ((0, 2), (2, 5), (5, 8))] == [True] * 3


@pytest.mark.parametrize("splits", [0, -1, 1.5, True])
def test_wrong_splits(splits):
    with pytest.raises(bn.BatchNormError, match=r"SplitBatchNorm: splits is .*; use a whole number from 1 up"):
        bn.SplitBatchNorm(20, splits)


@pytest.mark.parametrize("shuffle", [False, True])
def test_more_parts_than_samples(shuffle, path):
    layer = bn.SplitBatchNorm(20, 4, shuffle=shuffle)
    with pytest.raises(bn.BatchNormError, match="SplitBatchNorm: 3 samples do not fall into 4 groups; use fewer"):
        layer(torch.randn(3, 20, 18))
    assert layer.eval()(torch.randn(3, 20, 18)).shape == (3, 20, 18)
