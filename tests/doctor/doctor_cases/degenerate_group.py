"""BN111, after opacus#567: BatchNorm1d(4) was replaced by GroupNorm(4, 4), and every input gave the same answer."""

import torch
from torch import nn

import batchnorm as bn


def flat(norm, rows=8, features=4, training=False):
    model = nn.Sequential(nn.Linear(3, features), norm, nn.Linear(features, 2))
    return {"model": model.train(training), "example": torch.randn(rows, 3)}


def maps(norm, size=1, rows=4, training=False):
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.AdaptiveAvgPool2d(size), norm)
    return {"model": model.train(training), "example": torch.randn(rows, 3, 8, 8)}


SICK = {
    "opacus": lambda: flat(nn.GroupNorm(4, 4)),
    "a prime number of channels": lambda: flat(nn.GroupNorm(7, 7), features=7),
    "maps of one pixel": lambda: maps(nn.GroupNorm(32, 32)),
    "a layer norm of one feature": lambda: flat(nn.LayerNorm(1), features=1),
    "one channel": lambda: flat(nn.GroupNorm(1, 1), features=1),
    "instance norm that tracks": lambda: maps(nn.InstanceNorm2d(32, track_running_stats=True)),
    "batch norm, one example": lambda: maps(nn.BatchNorm2d(32), rows=1, training=True),
    "batch norm, one row": lambda: flat(nn.BatchNorm1d(4), rows=1, training=True),
    "ghost batches of one": lambda: flat(bn.GhostBatchNorm(4, 1), training=True),
}
NO_FIX = (
    "a layer norm of one feature", "one channel", "instance norm that tracks", "batch norm, one example",
    "batch norm, one row", "ghost batches of one",
)  # fmt: skip
HEALTHY = {
    "one group": lambda: flat(nn.GroupNorm(1, 4)),
    "two channels a group": lambda: flat(nn.GroupNorm(2, 4)),
    "groups of one channel on maps": lambda: maps(nn.GroupNorm(32, 32), size=2),
    "instance norm on maps": lambda: maps(nn.InstanceNorm2d(32), size=2),
    "batch norm, several examples": lambda: maps(nn.BatchNorm2d(32), training=True),
    "batch norm, one example, evaluation": lambda: maps(nn.BatchNorm2d(32), rows=1),
    "running statistics for one value": lambda: flat(bn.BatchNorm1d(4, one_value="running"), rows=1, training=True),
    "frozen": lambda: flat(bn.FrozenBatchNorm(4), rows=1, training=True),
    "layer norm": lambda: flat(nn.LayerNorm(4)),
}
