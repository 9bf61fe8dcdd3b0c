"""BN204, after pytorch/pytorch#4534 and fastai#1352: a dataset of n * batch_size + 1 examples."""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchnorm as bn


def classifier(kind=nn.BatchNorm1d, **arguments):
    return nn.Sequential(nn.Linear(5, 8), kind(8, **arguments), nn.ReLU(), nn.Linear(8, 2))


def pooled():
    """The image branch of an atrous spatial pyramid: a map of one pixel, whatever the image's size."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)
    )


def case(model, examples=33, shape=(5,), **options):
    options = {"batch_size": 8, **options}
    return {"model": model, "data": DataLoader(TensorDataset(torch.randn(examples, *shape)), **options)}


def loop(monitor, model, x, training=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train(training)
    with monitor(model, optimizer):
        for batch in x.split(8):
            optimizer.zero_grad()
            with contextlib.suppress(ValueError):  # what ends the epoch
                model(batch).square().mean().backward()
                optimizer.step()


SICK = {
    "a remainder of one": lambda: case(classifier()),
    "batches of one": lambda: case(classifier(), batch_size=1),
    "a map of one pixel": lambda: case(pooled(), shape=(3, 8, 8)),
    "a layer of ours": lambda: case(classifier(bn.BatchNorm1d)),
}
HEALTHY = {
    "dropped": lambda: case(classifier(), drop_last=True),
    "a remainder of two": lambda: case(classifier(), examples=34),
    "no remainder": lambda: case(classifier(), examples=32),
    "running statistics for one value": lambda: case(classifier(bn.BatchNorm1d, one_value="running")),
    "evaluation mode": lambda: case(classifier().eval()),
    "maps of many pixels": lambda: case(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), shape=(3, 8, 8)),
    "frozen": lambda: case(bn.freeze(classifier())[0]),
    "no BN": lambda: case(nn.Linear(5, 2)),
}
SICK_RUNS = {
    "a last batch of one": lambda monitor: loop(monitor, classifier(), torch.randn(17, 5)),
    "a map of one pixel": lambda monitor: loop(monitor, pooled(), torch.randn(9, 3, 8, 8)),
    "a layer of ours": lambda monitor: loop(monitor, classifier(bn.BatchNorm1d), torch.randn(17, 5)),
}
HEALTHY_RUNS = {
    "a last batch of two": lambda monitor: loop(monitor, classifier(), torch.randn(18, 5)),
    "running statistics for one value": lambda monitor: loop(
        monitor, classifier(bn.BatchNorm1d, one_value="running"), torch.randn(17, 5)
    ),
    "one image": lambda monitor: loop(
        monitor, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(9, 3, 8, 8)
    ),
    "evaluation mode": lambda monitor: loop(monitor, classifier(), torch.randn(17, 5), training=False),
}
