"""Ranks that are not at the same place: found out by the exchange, on every rank; the group stays usable."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from rank_checks import check, compare, equal_sizes, raised, raised_on_all, shares
from torch import nn

import batchnorm as bn


@check(4, 7)
def another_layer(channels):
    """Rank 1 skips a layer and goes on to the next one, with as many channels or with others."""
    model = nn.ModuleDict({"one": bn.SyncBatchNorm(4), "two": bn.SyncBatchNorm(channels)})
    x = {"one": torch.randn(4, 4, 3), "two": torch.randn(4, channels, 3)}
    for name, layer in model.items():
        layer(x[name])
    name = "two" if dist.get_rank() == 1 else "one"
    message = raised(lambda: model[name](x[name]))
    raised_on_all(
        message, f"'{name}' (SyncBatchNorm", "step 2 (forward)", "rank 1 is in 'two' (SyncBatchNorm", "in 'one'"
    )
    compare(shares(equal_sizes(), (16, 5, 7)), torch.float64)  # the group is sound


@check()
def another_layer_at_first_sight():
    """A layer that rank 0 has not seen yet is not mistaken for the one it is in."""
    known, new = bn.SyncBatchNorm(4), bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3)
    known(x)
    message = raised(lambda: (new if dist.get_rank() == 1 else known)(x))
    raised_on_all(message, "rank 1 is in", "not at the same place")


@check()
def another_direction():
    """Rank 1 runs a second forward pass where the others run backward."""
    layer = bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3, requires_grad=True)
    y = layer(x)
    message = raised((lambda: layer(x)) if dist.get_rank() == 1 else (lambda: y.sum().backward()))
    raised_on_all(message, "step 2 (forward)", "step 1 (backward)", "rank 1 is")


@check()
def another_mode():
    layer = bn.SyncBatchNorm(4, statistics="batch")
    x = torch.randn(4, 4, 3)
    layer.train(dist.get_rank() != 1)
    message = raised(lambda: layer(x))
    raised_on_all(message, "rank 1 is in", "in evaluation mode", "in training mode")


@check()
def another_update():
    layer = bn.SyncBatchNorm(4, update=dist.get_rank() != 1)
    message = raised(lambda: layer(torch.randn(4, 4, 3)))
    raised_on_all(message, "rank 1 is in", "without updating its running statistics")


@check()
def another_gradient_mode():
    layer = bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3, requires_grad=True)
    with torch.no_grad() if dist.get_rank() == 1 else nullcontext():
        message = raised(lambda: layer(x))
    raised_on_all(message, "rank 1 computes no gradients", "step 1 (forward)")


@check()
def an_input_of_other_channels_is_refused_before_the_exchange():
    layer = bn.SyncBatchNorm(4)
    assert "expected an input of 4 channels" in raised(lambda: layer(torch.randn(2, 3)))
    assert "expected an input of 4 channels" in raised(lambda: layer(torch.randn(4)))
    layer(torch.randn(2, 4))
