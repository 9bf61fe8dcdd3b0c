"""BN305, after ignite#2590 and mean-teacher#9: an average over parameters, evaluated with the first buffers."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import batchnorm as bn


def network(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(3, 8), norm(8), nn.ReLU(), nn.Linear(8, 1))


def parameters_only(average, model):
    with torch.no_grad():
        for p, q in zip(average.parameters(), model.parameters(), strict=True):
            p.lerp_(q, 0.1)


def all_of_it(average, model):
    parameters_only(average, model)
    for p, q in zip(average.buffers(), model.buffers(), strict=True):
        p.copy_(q)


def averaged(model, **options):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), **options)


def swa(average, model):
    average.update_parameters(model)


def train(monitor, average, follow, evaluate=True, end=lambda average: None, model=None, steps=10):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = average(model)
    with monitor(model, optimizer, copies={"ema": average}):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 3) + 2).square().mean().backward()
            optimizer.step()
            follow(average, model)
            if evaluate and step == steps - 2:
                with torch.no_grad():
                    average.eval()(torch.randn(16, 3) + 2)
        end(average)


def copied(model):
    return copy.deepcopy(model).eval()


def teacher_in_training_mode(average, model):
    parameters_only(average, model)
    with torch.no_grad():
        average.train()(torch.randn(16, 3) + 2)


def wrapped(model):
    """Under another name, as wrappers have it."""
    return AveragedModel(model)


SICK_RUNS = {
    "parameters only": lambda monitor: train(monitor, copied, parameters_only),
    "our layers": lambda monitor: train(monitor, copied, parameters_only, model=network(bn.BatchNorm1d)),
    "in a wrapper": lambda monitor: train(monitor, wrapped, lambda a, m: parameters_only(a.module, m)),
    "not used yet": lambda monitor: train(monitor, copied, parameters_only, evaluate=False),
}
HEALTHY_RUNS = {
    "buffers, too": lambda monitor: train(monitor, copied, all_of_it),
    "AveragedModel, which copies them": lambda monitor: train(monitor, averaged, swa),
    "use_buffers": lambda monitor: train(monitor, lambda model: averaged(model, use_buffers=True), swa),
    "update_bn before it is used": lambda monitor: train(
        monitor, copied, parameters_only, evaluate=False, end=lambda m: update_bn(list(torch.randn(4, 16, 3) + 2), m)
    ),
    "a teacher with batch statistics": lambda monitor: train(monitor, copied, teacher_in_training_mode, evaluate=False),
    "a copy that stays": lambda monitor: train(monitor, copied, lambda average, model: None),
    "frozen statistics": lambda monitor: train(monitor, copied, parameters_only, model=bn.freeze(network())[0]),
    "other layers": lambda monitor: train(monitor, copied, parameters_only, model=network(lambda c: nn.LayerNorm(c))),
}
