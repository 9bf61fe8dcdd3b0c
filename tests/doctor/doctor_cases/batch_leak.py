"""BN306: a training loader over a sorted folder, one class after the other, and batches that only look like it."""

import torch
from torch import nn

CLASSES = 4


def network():
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def data(order, classes=CLASSES, examples=768, apart=2.0):
    """Blobs, one a class, in batches of 16."""
    labels = torch.arange(classes).repeat_interleave(examples // classes)
    x = apart * torch.randn(classes, 6)[labels] + torch.randn(len(labels), 6)
    keep = order(labels)
    return list(zip(x[keep].split(16), labels[keep].split(16), strict=True))


def in_order(labels):
    return torch.arange(len(labels))


def shuffled(labels):
    return torch.randperm(len(labels))


def nearly(labels):
    """Shuffled in a buffer of two batches, as a streaming reader does."""
    return torch.cat([part[torch.randperm(len(part))] for part in torch.arange(len(labels)).split(32)])


def balanced(labels):
    """Every batch has as many of each class: more even than chance."""
    return torch.arange(len(labels)).reshape(CLASSES, -1).T.flatten()


def given(order, model=None, **options):
    return {"model": model or network(), "data": data(order, **options)}


def train(monitor, batches, model=None, tell=True):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer) as run:
        for x, y in batches:
            if tell:
                run.set_labels(y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def convolutional():
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, CLASSES))


SICK = {
    "sorted": lambda: given(in_order),
    "a small buffer": lambda: given(nearly),
    "convolutions": lambda: given(in_order, convolutional()),
    "in evaluation mode": lambda: given(in_order, network().eval()),
}
HEALTHY = {
    "shuffled": lambda: given(shuffled),
    "balanced": lambda: given(balanced),
    "many classes, shuffled": lambda: given(shuffled, classes=192),
    "classes that do not differ": lambda: given(in_order, apart=0.0),
    "no BN": lambda: given(in_order, nn.Linear(6, CLASSES)),
    "one class": lambda: given(in_order, classes=1),
}
SICK_RUNS = {
    "sorted": lambda monitor: train(monitor, data(in_order, examples=1536)),
    "a small buffer, convolutions": lambda monitor: train(monitor, data(nearly, examples=1536), convolutional()),
    "long stretches of a class": lambda monitor: train(monitor, data(in_order, examples=3072)),
}
HEALTHY_RUNS = {
    "shuffled": lambda monitor: train(monitor, data(shuffled, examples=1536)),
    "balanced": lambda monitor: train(monitor, data(balanced, examples=1536)),
    "classes that do not differ": lambda monitor: train(monitor, data(in_order, apart=0.0, examples=1536)),
    "no labels": lambda monitor: train(monitor, data(in_order, examples=1536), tell=False),
}
