"""BN113: channels that weight decay, or a dead filter, has left without effect."""

import torch
from torch import nn

import batchnorm as bn


def layer(norm=nn.BatchNorm2d, batches=5000, **values):
    made = norm(8)
    with torch.no_grad():
        if made.weight is not None:
            made.weight.uniform_(0.5, 1.5)
        made.running_var.uniform_(0.5, 2.0)
        for name, (channels, value) in values.items():
            getattr(made, name)[channels] = value
        made.num_batches_tracked.fill_(batches)
    return made


def model(*layers):
    return {"model": nn.Sequential(nn.Conv2d(8, 8, 3), *layers)}


def checkpoint(*layers):
    return {"model": nn.Sequential(*layers).state_dict()}


def filters_that_died():
    """Half of the filters are zero, and BN has seen enough batches to know."""
    made = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
    with torch.no_grad():
        made[0].weight[:4] = 0.0
        for _ in range(200):
            made(torch.randn(16, 4))
    return {"model": made}


ALL = slice(None)
SICK = {
    "gamma": lambda: model(layer(weight=([1, 4], 1e-9))),
    "variance": lambda: model(layer(running_var=([1, 4, 5], 1e-12))),
    "both, in one channel": lambda: model(layer(weight=([1], 0.0), running_var=([1], 0.0))),
    "filters that died": filters_that_died,
    "a checkpoint": lambda: checkpoint(layer(weight=([0], 1e-8)), layer()),
    "without gamma": lambda: model(layer(lambda c: nn.BatchNorm2d(c, affine=False), running_var=([1], 0.0))),
    "ours, frozen": lambda: model(layer(bn.FrozenBatchNorm, weight=([2], 0.0))),
    "zero as a whole, after training": lambda: model(layer(weight=(ALL, 0.0))),
    "a checkpoint that does not count": lambda: {
        "model": {k: v for k, v in checkpoint(layer(weight=([3], 0.0)))["model"].items() if "batches" not in k}
    },
    "dead filters under a gamma of zero": lambda: model(layer(batches=0, weight=(ALL, 0.0), running_var=([1], 0.0))),
}
HEALTHY = {
    "alive": lambda: model(layer()),
    "as built": lambda: model(nn.BatchNorm2d(8)),
    "zero on purpose": lambda: model(layer(batches=0, weight=(ALL, 0.0))),
    "zero on purpose, in a checkpoint": lambda: checkpoint(layer(batches=3, weight=(ALL, 0.0))),
    "drawn at random, not trained": lambda: model(layer(batches=20, weight=([1], 1e-5))),
    "small, but not so small": lambda: model(layer(weight=([1], 0.01), running_var=([2], 1e-3))),
    "zero, in a checkpoint that does not count": lambda: {
        "model": {k: v for k, v in checkpoint(layer(weight=(ALL, 0.0)))["model"].items() if "batches" not in k}
    },
    "small as a whole": lambda: model(layer(weight=(ALL, 1e-6), running_var=(ALL, 1e-12))),
    "inputs of different units": lambda: model(layer(running_var=([0, 1], 1e9))),
    "negative": lambda: model(layer(weight=([0, 3], -1.0))),
    "one channel": lambda: {"model": nn.BatchNorm1d(1)},
    "no statistics": lambda: model(nn.BatchNorm2d(8, track_running_stats=False)),
    "on no device": lambda: {"model": nn.BatchNorm1d(4, device="meta")},
}
