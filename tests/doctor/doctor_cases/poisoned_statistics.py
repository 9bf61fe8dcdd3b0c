"""BN203, after pytorch/pytorch#1206: one batch with a NaN, and every evaluation from then on is NaN."""

import warnings

import torch
from torch import nn

import batchnorm as bn


def network(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(3, 20), kind(20), nn.ReLU(), nn.Linear(20, 20), kind(20))


def seen(model, bad=None, value=float("nan")):
    """A model after three batches, the second of which has a bad value; nothing is learned but statistics."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bn.BatchNormWarning)
        for step in range(3):
            x = torch.randn(16, 3)
            if step == 1 and bad is not None:
                x[bad] = value
            model(x)
    return model


def data():
    return {"data": list(torch.randn(4, 32, 3))}


def negative():
    model = seen(network())
    model[1].running_var[2] = -0.5  # a state_dict that was averaged with negative weights
    return {"model": model, **data()}


def lost():
    arguments = {"model": seen(network(), (0, 0)), **data()}
    with torch.no_grad():
        arguments["model"][0].weight[0, 0] = float("nan")
    return arguments


def spoiled(batches, kind=nn.BatchNorm1d, value=float("nan")):
    """A good model, and data of which some batches are not finite."""
    arguments = {"model": seen(network(kind)), **data()}
    for number in batches:
        arguments["data"][number][5, 1] = value
    return arguments


class Tolerant(nn.Module):
    """Takes care of what is missing."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x.nan_to_num(posinf=0.0, neginf=0.0))


def loop(monitor, model, spoil, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore", bn.BatchNormWarning)
        for step in range(steps):
            x = torch.randn(16, 3)
            if step == 3:
                x = spoil(model, x)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if bool(loss.isfinite()):  # the loop skips what it cannot learn from, and thinks that is enough
                loss.backward()
                optimizer.step()


def bad_batch(model, x):
    x[2, 1] = float("inf")
    return x


def bad_weight(model, x):
    with torch.no_grad():
        model[3].weight[0, 0] = float("nan")
    return x


def too_large(model, x):
    return x * 1e30


EXAMPLE = torch.full((8, 3), torch.nan)
NO_FIX = ("parameters too", "data", "data of one batch", "one batch of the data", "our layers", "an example",
          "no layers at all")  # fmt: skip
SICK = {
    "a NaN in a batch": lambda: {"model": seen(network(), (0, 0)), **data()},
    "an infinity in a batch": lambda: {"model": seen(network(), (3, 2), float("inf")), **data()},
    "a negative variance": negative,
    "a checkpoint": lambda: {"model": seen(network(), (0, 0)).state_dict()},
    "parameters too": lost,
    "data": lambda: spoiled(range(4)),
    "data of one batch": lambda: {"model": network().eval(), "data": [EXAMPLE]},
    "one batch of the data": lambda: spoiled([2], value=float("inf")),
    "our layers": lambda: spoiled([1, 2], bn.BatchNorm1d),
    "an example": lambda: {"model": network(), "example": EXAMPLE},
    "no layers at all": lambda: {"model": nn.Linear(3, 2), "example": EXAMPLE},
}
HEALTHY = {
    "good batches": lambda: {"model": seen(network())},
    "layers of ours": lambda: {"model": seen(network(bn.BatchNorm1d), (0, 0))},
    "a checkpoint": lambda: {"model": seen(network()).state_dict()},
    "no running statistics": lambda: {"model": nn.BatchNorm1d(3, track_running_stats=False)},
    "missing values that the model fills in": lambda: {"model": Tolerant(), "example": EXAMPLE, "data": [EXAMPLE]},
    "good data and example": lambda: {"model": network(), "example": torch.randn(8, 3), **data()},
    "on no device": lambda: {"model": nn.BatchNorm1d(3, device="meta")},
}
SICK_RUNS = {
    "a bad batch": lambda monitor: loop(monitor, network(), bad_batch),
    "a bad weight": lambda monitor: loop(monitor, network(), bad_weight),
    "from before": lambda monitor: loop(monitor, seen(network(), (0, 0)), lambda model, x: x),
    "an overflow": lambda monitor: loop(monitor, network(), too_large),
}
HEALTHY_RUNS = {
    "good batches": lambda monitor: loop(monitor, network(), lambda model, x: x),
    "layers of ours": lambda monitor: loop(monitor, network(bn.BatchNorm1d), bad_batch),
    "large but finite": lambda monitor: loop(monitor, network(), lambda model, x: x * 1e15),
}
