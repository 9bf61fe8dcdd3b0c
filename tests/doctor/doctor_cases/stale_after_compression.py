"""BN504, after nncf#41: a network that lost its small weights, with the statistics of the one that had them."""

import copy

import torch
from doctor_cases.stale_statistics import trained, without_effect
from torch import nn

import batchnorm as bn


@torch.no_grad()
def pruned(model, share):
    model = copy.deepcopy(model)
    weight = model[0].weight
    weight[weight.abs() < weight.abs().flatten().quantile(share)] = 0
    return model


@torch.no_grad()
def coarse(model, step):
    """Weights in steps of so much: two or three bits."""
    model = copy.deepcopy(model)
    model[0].weight.copy_((model[0].weight / step).round() * step)
    return model


def case(change, momentum=0.1):
    model, batches = trained(momentum)
    return {"model": change(model), "before": model, "data": batches}


def calibrated(model):
    _, batches = trained(0.1)
    return bn.calibrate(pruned(model, 0.7), batches)[0]


SICK = {
    "pruned": lambda: case(lambda model: pruned(model, 0.7)),
    "quantised": lambda: case(lambda model: coarse(model, 0.5)),
}
HEALTHY = {
    "as it was": lambda: case(copy.deepcopy),
    "calibrated": lambda: case(calibrated),
    "hardly pruned": lambda: case(lambda model: pruned(model, 0.02)),
    "no effect": lambda: without_effect(case(lambda model: pruned(model, 0.7))),
    "stale before": lambda: case(lambda model: pruned(model, 0.7), momentum=0.001),
    "no BN": lambda: {"model": nn.Linear(2, 2), "before": nn.Linear(2, 2), "data": [torch.randn(8, 2)]},
}
