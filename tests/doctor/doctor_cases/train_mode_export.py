"""BN501, after anomalib#2909: a model that is exported as it comes out of training."""

import warnings

import torch
from torch import nn

import batchnorm as bn


def network(**arguments):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **arguments), nn.ReLU())


X = torch.zeros(2, 3, 6, 6)


def exported(model, decomposed=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (X,))
        return {"model": (program.run_decompositions() if decomposed else program).module()}


def to_export(model):
    return {"model": model, "purpose": "export"}


def export_in(monitor, model, how):
    with monitor(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how(model)


def by_export(model):
    torch.export.export(model, (X,))


def by_tracing(model):
    torch.jit.trace(model, X, check_trace=False)


def forgotten_part():
    model = network().eval()
    model[1].train()
    return model


NO_FIX = ("no running statistics", "exported already", "exported and decomposed", "set to use the batch")
SICK = {
    "training mode": lambda: to_export(network()),
    "one layer in training mode": lambda: to_export(forgotten_part()),
    "no running statistics": lambda: to_export(network(track_running_stats=False).eval()),
    "set to use the batch": lambda: to_export(nn.Sequential(bn.BatchNorm2d(3, statistics="batch")).eval()),
    "exported already": lambda: exported(network()),
    "exported and decomposed": lambda: exported(network(), decomposed=True),
}
HEALTHY = {
    "evaluation mode": lambda: to_export(network().eval()),
    "training mode, to be trained": lambda: {"model": network()},
    "frozen": lambda: to_export(bn.freeze(network())[0]),
    "exported in evaluation mode": lambda: exported(network().eval()),
    "exported in evaluation mode and decomposed": lambda: exported(network().eval(), decomposed=True),
    "no BN": lambda: to_export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))),
}
SICK_RUNS = {
    "torch.export": lambda monitor: export_in(monitor, network(), by_export),
    "torch.jit.trace": lambda monitor: export_in(monitor, network(), by_tracing),
    "no running statistics": lambda monitor: export_in(monitor, network(track_running_stats=False).eval(), by_export),
}
HEALTHY_RUNS = {
    "torch.export": lambda monitor: export_in(monitor, network().eval(), by_export),
    "torch.jit.trace": lambda monitor: export_in(monitor, network().eval(), by_tracing),
    "training": lambda monitor: export_in(monitor, network(), lambda model: model(X)),
}
