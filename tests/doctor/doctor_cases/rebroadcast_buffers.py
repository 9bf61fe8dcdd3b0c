"""BN403, after pytorch/pytorch#22095: a wrapper that writes into buffers before every forward pass."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn


class Wrapper(DistributedDataParallel):
    """Writes as torch 2.7's wrapper does on several processes; it needs none."""

    broadcast_buffers = True

    def __init__(self, module, broadcast=True):
        nn.Module.__init__(self)
        self.module = module
        self.broadcast_buffers = broadcast

    def _sync_buffers(self):
        for buffer in self.buffers():
            buffer.copy_(buffer.clone())

    def forward(self, *given):
        if self.broadcast_buffers:
            with torch.no_grad():
                self._sync_buffers()
        return self.module(*given)


def critic(kind=nn.BatchNorm1d, **arguments):
    return nn.Sequential(nn.Linear(3, 8), kind(8, **arguments), nn.ReLU(), nn.Linear(8, 1))


def loop(monitor, model, learn):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for real in torch.randn(3, 8, 3):
            optimizer.zero_grad()
            learn(model, real, torch.randn(8, 3))
            optimizer.step()


def together(model, real, fake):
    loss = model(real).mean() - model(fake).mean()
    raises = getattr(model, "broadcast_buffers", False) and type(model.module[1]) is nn.BatchNorm1d
    with pytest.raises(RuntimeError, match="modified by an inplace") if raises else contextlib.nullcontext():
        loss.backward()


def one_by_one(model, real, fake):
    model(real).mean().backward()
    (-model(fake).mean()).backward()


def kept_for_another(model, real, fake):
    """The graph of the first pass is kept, though its backward pass has run."""
    loss = model(real).mean()
    loss.backward(retain_graph=True)
    (-model(fake).mean()).backward()
    assert loss.grad_fn is not None


def one_is_dropped(model, real, fake):
    model(fake)
    model(real).mean().backward()


SICK = {"broadcast": lambda: {"model": Wrapper(critic())}}
HEALTHY = {
    "not broadcast": lambda: {"model": Wrapper(critic(), broadcast=False)},
    "layers of ours": lambda: {"model": Wrapper(critic(bn.BatchNorm1d))},
    "no buffers": lambda: {"model": Wrapper(critic(track_running_stats=False))},
    "not wrapped": lambda: {"model": critic()},
}
SICK_RUNS = {"two forward passes": lambda monitor: loop(monitor, Wrapper(critic()), together)}
HEALTHY_RUNS = {
    "a backward pass between": lambda monitor: loop(monitor, Wrapper(critic()), one_by_one),
    "a backward pass between, and the graph is kept": lambda monitor: loop(
        monitor, Wrapper(critic()), kept_for_another
    ),
    "the first is not used": lambda monitor: loop(monitor, Wrapper(critic()), one_is_dropped),
    "not broadcast": lambda monitor: loop(monitor, Wrapper(critic(), broadcast=False), together),
    "layers of ours": lambda monitor: loop(monitor, Wrapper(critic(bn.BatchNorm1d)), together),
    "not wrapped": lambda monitor: loop(monitor, critic(), together),
}
