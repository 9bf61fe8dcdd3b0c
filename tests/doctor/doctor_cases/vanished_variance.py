"""BN209: a running variance of zero, whose channel is alive; evaluation divides it by the root of eps."""

import torch
from torch import nn

import batchnorm as bn

ALL = slice(None)


def network(norm=nn.BatchNorm1d):
    """A network with statistics, behind a layer that makes inputs of variance 4."""
    model = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 8), norm(8))
    with torch.no_grad():
        model[0].weight.copy_(torch.nn.init.orthogonal_(torch.empty(8, 6)) * 2)
        for _ in range(200):
            model(torch.randn(32, 6))
    return model.eval()


def case(channels, value, norm=nn.BatchNorm1d, layer=1, scale=1.0, training=False, **more):
    model = network(norm)
    model[layer].running_var[channels] = value
    return {"model": model.train(training), "data": [scale * torch.randn(32, 6) for _ in range(4)], **more}


def one_example(arguments, n=32):
    return {"model": arguments["model"], "example": arguments["data"][0][:n]}


def images(value):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    with torch.no_grad():
        for _ in range(100):
            model(torch.randn(4, 3, 8, 8))
    model[1].running_var[2] = value
    return {"model": model.eval(), "example": torch.randn(1, 3, 8, 8), "data": [torch.randn(4, 3, 8, 8)] * 2}


def dead(n=4, alive=1e-7):
    """Filters that are zero: the running variance is right."""
    model = network()
    with torch.no_grad():
        model[0].weight[:n] *= alive
        model[1].running_var[:n] = 0.0
        model[1].running_mean[:n] = model[0].bias[:n]
    return {"model": model, "data": list(torch.randn(4, 32, 6))}


def rare():
    """A feature that is hardly ever there; one example of the data has it."""
    model = nn.Sequential(nn.BatchNorm1d(6))
    with torch.no_grad():
        for _ in range(200):
            model(torch.randn(32, 6) * torch.tensor([0.0, 1, 1, 1, 1, 1]))
    x = torch.randn(4, 32, 6) * torch.tensor([0.0, 1, 1, 1, 1, 1])
    x[1, 3, 0] = 20.0
    return {"model": model.eval(), "data": list(x)}


def faded():
    arguments = case([2], 0.0)
    with torch.no_grad():
        arguments["model"][1].weight[2] = 1e-9
    return arguments


def started_at_zero():
    """An average of the buffers that begins at zero, after 20 steps."""
    arguments = case([], 0.0)
    for name, buffer in arguments["model"].named_buffers():
        if "running_" in name:
            buffer *= 1 - 0.99999**20
    return arguments


NO_FIX = ("no example", "no example, next to nothing")
SICK = {
    "zero": lambda: case([2], 0.0),
    "zero, an image": lambda: images(0.0),
    "slightly negative": lambda: case([2], -1e-9),
    "next to nothing": lambda: case([1, 5], 1e-12),
    "far too small": lambda: case([3], 1e-4),
    "all of them": lambda: case(ALL, 0.0),
    "in training mode": lambda: case([2], 0.0, training=True),
    "a later layer": lambda: case([0, 7], 0.0, layer=4),
    "two layers": lambda: {**case([0], 0.0), "model": two()},
    "ours": lambda: case([2], 0.0, norm=bn.BatchNorm1d),
    "data of another scale": lambda: case([2], 0.0, scale=20.0),
    "an average that began at zero": started_at_zero,
    "no example": lambda: {"model": case(ALL, 0.0)["model"]},
    "no example, next to nothing": lambda: {"model": case(ALL, 1e-12)["model"]},
    "a checkpoint": lambda: {"model": case(ALL, 0.0)["model"].state_dict()},
}
HEALTHY = {
    "as measured": lambda: case([], 0.0),
    "as measured, in training mode": lambda: case([], 0.0, training=True),
    "dead filters": dead,
    "all filters dead": lambda: dead(8),
    "a rare feature": rare,
    "a channel without gamma": faded,
    "small, and right": lambda: {"model": small(), "data": list(torch.randn(4, 32, 6))},
    "an example that is constant": lambda: {"model": case([2], 0.0)["model"], "example": torch.zeros(8, 6)},
    "one channel, no example": lambda: {"model": case([2], 0.0)["model"]},
    "data of another scale": lambda: case([], 0.0, scale=255.0),
    "as new": lambda: {"model": nn.Sequential(nn.BatchNorm1d(6)).eval(), "data": list(100 * torch.randn(4, 32, 6))},
    "negative even with eps: another rule's": lambda: case([2], -1.0),
    "no statistics": lambda: {"model": nn.BatchNorm1d(6, track_running_stats=False), "example": torch.randn(8, 6)},
    "on no device": lambda: {"model": nn.BatchNorm1d(3, device="meta")},
}


def two():
    model = case([0], 0.0)["model"]
    model[4].running_var[1] = 0.0
    return model


def small():
    """Inputs of a small scale, with statistics to match."""
    model = network()
    with torch.no_grad():
        model[0].weight *= 1e-3
        model[0].bias.zero_()
        model[1].running_var *= 1e-6
        model[1].running_mean.zero_()
    model.train()
    with torch.no_grad():
        for _ in range(200):
            model(torch.randn(32, 6))
    return model.eval()
