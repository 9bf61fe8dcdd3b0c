"""BN201, after pytorch/pytorch#4741: a momentum so small that the running statistics stay near where they began."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import batchnorm as bn
from batchnorm.lab.data.digits import load


class Labels(nn.Module):
    """A model that answers with labels only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).argmax(1)


class Unused(nn.Module):
    """A model with a second head that is never called."""

    def __init__(self, model):
        super().__init__()
        self.model, self.other = model, nn.BatchNorm1d(3)
        self.other.running_mean.fill_(50)

    def forward(self, x):
        return self.model(x)


def blobs(number=192):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat(number // 3)
    centres = 3 * torch.randn(3, 6, generator=generator) + 4
    x = centres[labels] + torch.randn(number, 6, generator=generator)
    order = torch.randperm(number, generator=generator)
    return x[order], labels[order]


def cut(number, size):
    x, labels = blobs()
    return list(zip(x[:number].split(size), labels[:number].split(size), strict=True))


def trained(momentum, steps=60):
    """A classifier of shifted blobs, after some steps of training, with its data."""
    model = nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16, momentum=momentum), nn.ReLU(), nn.Linear(16, 3)
    )
    x, labels = blobs()
    batches = list(zip(x.split(32), labels.split(32), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, batches


def case(momentum, labels=True, wrap=lambda model: model, data=None):
    model, batches = trained(momentum)
    return {"model": wrap(model), "data": data or (batches if labels else [x for x, _ in batches])}


def with_bad(momentum, value):
    arguments = case(momentum, labels=False)
    arguments["data"][1] = arguments["data"][1].clone()
    arguments["data"][1][0, 0] = value
    return arguments


def without_effect(arguments):
    """Gamma is 0: whatever the statistics are, nothing of them arrives at the outputs."""
    nn.init.zeros_(arguments["model"][1].weight)
    return arguments


def poisoned():
    arguments = case(0.1)
    arguments["model"][1].running_mean[0] = float("nan")
    return arguments


def pixel_by_pixel():
    """Data in batches of one image, to a network that learned from batches of 64: joined before they are compared."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    images = 3 * torch.randn(256, 1, 1, 1) + torch.randn(256, 1, 8, 8)
    with torch.no_grad():
        for batch in images.split(64) * 20:
            model(batch)
    return {"model": model, "data": list(images[:64].split(1))}


def worse(shift=20.0):
    """Sorted by class: the batches' own statistics give the classes away, and exact ones would be worse."""
    model, _ = trained(0.1)
    x, labels = blobs()
    shift = torch.where(labels == 0, shift, 0.0).unsqueeze(1)
    return {"model": model, "data": list(zip((x + shift).split(32), labels.split(32), strict=True))}


def averaged(measure=False):
    """Models that are far apart, averaged with the statistics of the last (use_buffers=False)."""
    runs = [trained(0.1) for _ in range(4)]
    average = AveragedModel(runs[0][0])
    for model, _ in runs:
        average.update_parameters(model)
    if measure:
        update_bn(runs[0][1], average)
    return {"model": average.eval(), "data": runs[0][1]}


def unbiased():
    """A new model whose biases were dropped: its running means hold them, its data it has not seen yet."""
    x = blobs()[0]
    model, _ = bn.drop_bias(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), x)
    return {"model": model, "data": [x]}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return (self.body(x) + self.short(x)).relu()


def residual(seed):
    """A small residual network."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(8, 8), nn.MaxPool2d(2),
        Block(8, 16), nn.MaxPool2d(2), Block(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def learn(model, rate, epochs, order=0):
    """Train on the digits."""
    digits = load()
    x, labels = torch.tensor(digits.train_images), torch.tensor(digits.train_labels)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    generator = torch.Generator().manual_seed(order)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model


def digits(number=600, size=100, labels=True):
    data = load()
    x, y = torch.tensor(data.train_images[:number]), torch.tensor(data.train_labels[:number])
    return list(zip(x.split(size), y.split(size), strict=True)) if labels else list(x.split(size))


def an_epoch():
    return {"model": learn(residual(0), 0.1, 1).eval(), "data": digits()}


def interpolated(measure=False):
    """Half way between two networks that went on from a common beginning with the data in other orders."""
    base = learn(residual(0), 0.05, 1)
    one, two = (learn(copy.deepcopy(base), 0.05, 3, order=order) for order in (1, 2))
    with torch.no_grad():
        theirs = two.state_dict()
        for name, value in one.state_dict().items():
            if value.is_floating_point():
                value.lerp_(theirs[name], 0.5)
    return {"model": bn.calibrate(one, digits())[0] if measure else one.eval(), "data": digits()}


def within_the_allowance(labels=True, by=0.22, number=600):
    """A deep classifier with exact statistics, of which each mean is then off by less than a running average may be."""
    torch.manual_seed(0)
    layers, width = [nn.Flatten()], 64
    for _ in range(8):
        layers += [nn.Linear(width, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()]
        width = 32
    model, _ = bn.calibrate(learn(nn.Sequential(*layers, nn.Linear(width, 10)), 0.05, 6), digits())
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.running_mean += by * layer.running_var.sqrt()
    return {"model": model.eval(), "data": digits(number, labels=labels)}


SICK = {
    "an epoch at a high rate": an_epoch,
    "two networks interpolated": interpolated,
    "each layer within the allowance": within_the_allowance,
    "an average of weights": averaged,
    "momentum 0.001": lambda: case(0.001),
    "without labels": lambda: case(0.001, labels=False),
    "outputs are labels": lambda: case(0.001, labels=False, wrap=Labels),
    "a last batch of one": lambda: case(
        0.001, data=[(x[:n], y[:n]) for (x, y), n in zip(trained(0.001)[1], (32, 32, 1), strict=False)] * 2
    ),
    "a batch with a NaN": lambda: with_bad(0.001, float("nan")),
    "a batch with an infinity": lambda: with_bad(0.001, float("inf")),
}
HEALTHY = {
    "two networks interpolated, measured": lambda: interpolated(measure=True),
    "each layer within the allowance, without labels": lambda: within_the_allowance(labels=False),
    "each layer within the allowance, 16 labels": lambda: within_the_allowance(number=16),
    "an accuracy that is as good": lambda: within_the_allowance(by=0.02),
    "a trained network": lambda: {"model": learn(learn(residual(1), 0.02, 4), 0.002, 2).eval(), "data": digits()},
    "an average of weights, measured": lambda: averaged(measure=True),
    "momentum 0.1": lambda: case(0.1),
    "a cumulative average": lambda: case(None),
    "no running statistics": lambda: {
        "model": nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)),
        "data": list(torch.randn(4, 8, 2)),
    },
    "no BN": lambda: {"model": nn.Linear(3, 2), "data": [torch.randn(4, 3)]},
    "a new model": lambda: {"model": nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "data": [blobs()[0]]},
    "a new model without its biases": unbiased,
    "six examples": lambda: case(0.1, data=cut(6, 6)),
    "six examples, one by one": lambda: case(0.1, data=cut(6, 1)),
    "batches of one image": pixel_by_pixel,
    "an unused layer": lambda: case(0.1, wrap=Unused),
    "NaN in the statistics": poisoned,
    "no effect": lambda: without_effect(case(0.001)),
    "exact statistics are worse": worse,
    "exact statistics are a little worse": lambda: worse(-8.0),
}  # fmt: skip
