"""torch.fx sees one node per layer, as it does for torch's own; and buffers may move between forward and backward."""

import copy

import pytest
import torch
from torch import fx, nn

import batchnorm as bn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = bn.BatchNorm2d(16, activation="relu")
        self.last = bn.BatchNorm2d(16)

    def forward(self, x):
        y = self.conv(x)
        return self.last(self.norm(y, y))


def test_symbolic_trace_keeps_the_layer_as_one_node(path):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 4, 5, 5)
    traced = fx.symbolic_trace(copy.deepcopy(block))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["conv", "norm", "last"]
    torch.testing.assert_close(traced(x), block(x))
    torch.testing.assert_close(traced.norm.running_mean, block.norm.running_mean)


def test_a_training_step_between_forward_and_backward_does_not_change_the_gradient(path):
    torch.manual_seed(0)
    layer = bn.BatchNorm1d(16).eval()
    x = torch.randn(8, 16, requires_grad=True)
    (expected,) = torch.autograd.grad((layer(x) ** 2).sum(), x)
    loss = (layer(x) ** 2).sum()
    layer.train()(torch.randn(8, 16) * 5 + 3)
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, expected)
    assert (layer.running_var - 1).abs().max() > 0.5


def test_statistics_that_were_not_finite_before_are_not_blamed_on_the_batch(path):
    layer = bn.BatchNorm1d(16, nonfinite="raise")
    with torch.no_grad():
        layer.running_mean[3] = float("nan")
    layer(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    assert int(layer.num_batches_tracked) == 1
    assert torch.isfinite(layer.running_mean).sum() == 15
    assert (layer.running_var != 1).all()
    with pytest.raises(bn.NonFiniteBatch):
        layer(torch.full((8, 16), float("inf")))
