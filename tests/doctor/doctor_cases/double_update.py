"""BN302, after pytorch/pytorch#96136 and fairscale#1035: a checkpointed block updates in forward and recomputation."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import batchnorm as bn


class Checkpointed(nn.Module):
    def __init__(self, reentrant, norm=nn.BatchNorm1d, last=False):
        super().__init__()
        tail = () if last else (nn.ReLU(), nn.Linear(4, 4))
        self.reentrant = reentrant
        self.block, self.head = nn.Sequential(nn.Linear(3, 4), norm(4), *tail), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


class Sequential(nn.Module):
    """Segments of a sequence, as in memory-efficient DenseNets."""

    def __init__(self):
        super().__init__()
        parts = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)) for _ in range(4)]
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return checkpoint_sequential(self.body, 2, x, use_reentrant=False)


class OnlyInTheRecomputation(nn.BatchNorm1d):
    """What fairscale's wrapper does: statistics are kept when gradients are on."""

    def forward(self, x):
        self.track_running_stats = torch.is_grad_enabled()
        return super().forward(x)


def train(monitor, model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer) as run:
        for x in torch.randn(steps, 8, 3):
            optimizer.zero_grad()
            model(x.requires_grad_()).square().mean().backward()
            optimizer.step()
    return run


class Frozen(Checkpointed):
    def train(self, mode=True):
        super().train(mode)
        self.block[1].eval()
        return self


SICK_RUNS = {
    "reentrant": lambda monitor: train(monitor, Checkpointed(True)),
    "not reentrant": lambda monitor: train(monitor, Checkpointed(False)),
    "at the end of a block": lambda monitor: train(monitor, Checkpointed(False, last=True)),
    "our layer": lambda monitor: train(monitor, Checkpointed(False, bn.BatchNorm1d)),
    "in segments, one step": lambda monitor: train(monitor, Sequential(), steps=1),
}
HEALTHY_RUNS = {
    "update_once": lambda monitor: train(monitor, bn.update_once(Checkpointed(True))),
    "update_once at the end": lambda monitor: train(monitor, bn.update_once(Checkpointed(False, last=True))),
    "update_once, our layer": lambda monitor: train(monitor, bn.update_once(Checkpointed(False, bn.BatchNorm1d))),
    "our layer at the end, where the recomputation stops before it updates": lambda monitor: train(
        monitor, Checkpointed(False, bn.BatchNorm1d, last=True)
    ),
    "no checkpoint": lambda monitor: train(monitor, Checkpointed(False).block),
    "frozen": lambda monitor: train(monitor, Frozen(False).train()),
    "updates in the recomputation only": lambda monitor: train(monitor, Checkpointed(True, OnlyInTheRecomputation)),
    "batch statistics only": lambda monitor: train(
        monitor, Checkpointed(True, lambda c: nn.BatchNorm1d(c, track_running_stats=False))
    ),
}
