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


class Twins(nn.Module):
    """An encoder that learns and one that follows it, as in BYOL, in one module."""

    def __init__(self, encoder, training=False):
        super().__init__()
        self.online, self.target = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self.followers_mode = training

    def train(self, mode=True):
        super().train(mode)
        self.target.train(mode and self.followers_mode)
        return self

    def forward(self, x):
        return (self.online(x) - self.target(x)).square().mean()


def inside(monitor, follow, training=False, take=lambda both: both, encoder=network):
    both = Twins(encoder(), training).train()
    optimizer = torch.optim.SGD(both.online.parameters(), lr=0.05)
    with monitor(take(both), optimizer):
        for _ in range(10):
            optimizer.zero_grad()
            both(torch.randn(16, 3) + 2).backward()
            optimizer.step()
            follow(both.target, both.online)


def halves():
    """An encoder of two equal halves: of each there are two that learn, and two that follow."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)))


def apart(both):
    return {"student": both.online, "teacher": both.target}


def plain_average(monitor, before_use=lambda average: None, use=True, updates=3, **options):
    """Stochastic weight averaging, evaluated inside the run."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = AveragedModel(model, **options)
    with monitor(model, optimizer, copies={"swa": average}):
        for _ in range(updates):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(16, 3) + 2).square().mean().backward()
                optimizer.step()
            average.update_parameters(model)
        before_use(average)
        if use:
            with torch.no_grad():
                average.eval()(torch.randn(16, 3) + 2)


def generators(monitor, follow, make=copied, names=("G", "D"), alike=False, name="ema", part=None):
    """An average of one of several networks in one monitor; ``part``: of one that is inside it."""
    nets = {names[0]: network(), names[1]: network() if alike else nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))}
    nets[names[0]] = nn.ModuleDict({"body": nets[names[0]]}) if part else nets[names[0]]
    learns = nets[names[0]][part] if part else nets[names[0]]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets.values()]
    average, inputs = make(learns), 3 if alike else 1
    with monitor(nets, optimizers, copies={name: average}):
        for step in range(10):
            for net, optimizer, width in ((learns, optimizers[0], 3), (nets[names[1]], optimizers[1], inputs)):
                optimizer.zero_grad()
                net(torch.randn(16, width) + 2).square().mean().backward()
                optimizer.step()
            follow(average, learns)
            if step == 8:
                with torch.no_grad():
                    average.eval()(torch.randn(16, 3) + 2)


class Around(nn.Module):
    """A class of one's own around a copy."""

    def __init__(self, model):
        super().__init__()
        self.followed = copy.deepcopy(model)

    def forward(self, x):
        return self.followed(x)


def measures(average):
    update_bn(list(torch.randn(4, 16, 3) + 2), average)


def calibrates(average):
    bn.calibrate(average, list(torch.randn(4, 16, 3) + 2), progress=False, inplace=True)


SICK_RUNS = {
    "of one of two networks": lambda monitor: generators(monitor, parameters_only),
    "of the second of two": lambda monitor: generators(monitor, parameters_only, names=("Z", "D")),
    "of one of two of the same make": lambda monitor: generators(monitor, parameters_only, alike=True),
    "of the same make, by name": lambda monitor: generators(monitor, parameters_only, alike=True, name="G"),
    "of one of two, in a wrapper": lambda monitor: generators(
        monitor, lambda a, m: parameters_only(a.module, m), make=wrapped
    ),
    "of one of two, in a class around it": lambda monitor: generators(monitor, parameters_only, make=Around),
    "of a part of one of two": lambda monitor: generators(monitor, parameters_only, part="body"),
    "in a class around it": lambda monitor: train(monitor, Around, parameters_only),
    "a target in the model": lambda monitor: inside(monitor, parameters_only),
    "a target of equal halves": lambda monitor: inside(monitor, parameters_only, encoder=halves),
    "student and teacher": lambda monitor: inside(monitor, parameters_only, take=apart),
    "SWA without update_bn": plain_average,
    "parameters only": lambda monitor: train(monitor, copied, parameters_only),
    "our layers": lambda monitor: train(monitor, copied, parameters_only, model=network(bn.BatchNorm1d)),
    "in a wrapper": lambda monitor: train(monitor, wrapped, lambda a, m: parameters_only(a.module, m)),
    "not used yet": lambda monitor: train(monitor, copied, parameters_only, evaluate=False),
}
HEALTHY_RUNS = {
    "of one of two networks, with buffers": lambda monitor: generators(monitor, all_of_it),
    "of the same make, with buffers": lambda monitor: generators(monitor, all_of_it, alike=True),
    "in a class around it, with buffers": lambda monitor: generators(monitor, all_of_it, make=Around),
    "buffers, too": lambda monitor: train(monitor, copied, all_of_it),
    "AveragedModel, which copies them": lambda monitor: train(monitor, averaged, swa),
    "use_buffers": lambda monitor: train(monitor, lambda model: averaged(model, use_buffers=True), swa),
    "update_bn before it is used": lambda monitor: train(
        monitor, copied, parameters_only, evaluate=False, end=lambda m: update_bn(list(torch.randn(4, 16, 3) + 2), m)
    ),
    "a teacher with batch statistics": lambda monitor: train(monitor, copied, teacher_in_training_mode, evaluate=False),
    "SWA with update_bn": lambda monitor: plain_average(monitor, measures),
    "SWA, calibrated": lambda monitor: plain_average(monitor, calibrates),
    "SWA with use_buffers": lambda monitor: plain_average(monitor, use_buffers=True),
    "SWA that is not used": lambda monitor: plain_average(monitor, use=False),
    "SWA of one model": lambda monitor: plain_average(monitor, updates=1),
    "a target in training mode": lambda monitor: inside(monitor, parameters_only, training=True),
    "a target with its buffers": lambda monitor: inside(monitor, all_of_it),
    "a target that stays": lambda monitor: inside(monitor, lambda target, online: None),
    "a copy that stays": lambda monitor: train(monitor, copied, lambda average, model: None),
    "frozen statistics": lambda monitor: train(monitor, copied, parameters_only, model=bn.freeze(network())[0]),
    "other layers": lambda monitor: train(monitor, copied, parameters_only, model=network(lambda c: nn.LayerNorm(c))),
}
