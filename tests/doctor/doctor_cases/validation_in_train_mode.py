"""BN301, after the threads on stacked hourglass networks: a validation loop that forgets model.eval()."""

import torch
from torch import nn

import batchnorm as bn


def loop(monitor, validate):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for _ in range(2):
            for x in torch.randn(3, 8, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                validate(model, torch.randn(8, 3))


def forgets(model, x):
    model(x)


def remembers(model, x):
    model.eval()
    model(x)
    model.train()


def keeps(model, x):
    with bn.no_update(model):
        model(x)


def only_measures(monitor):
    """A pass over the data without gradients, and no training: somebody measures statistics."""
    model = nn.BatchNorm1d(3)
    with monitor(model), torch.no_grad():
        for x in torch.randn(3, 8, 3):
            model(x)


SICK_RUNS = {"no eval()": lambda monitor: loop(monitor, forgets)}
HEALTHY_RUNS = {
    "eval()": lambda monitor: loop(monitor, remembers),
    "no_update": lambda monitor: loop(monitor, keeps),
    "a calibration": only_measures,
}
