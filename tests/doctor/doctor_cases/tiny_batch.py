"""BN205, after BASNet#42 and CNTK#905: one or two examples a batch."""

import torch
from torch import nn

import batchnorm as bn


def dense(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(6, 16), kind(16), nn.ReLU(), nn.Linear(16, 1))


def images(number, alike=0.0):
    """Images whose pixels are alike, as far as it says, within an image."""
    return alike * torch.randn(number, 3, 1, 1) + torch.randn(number, 3, 8, 8)


def convolution(kind=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), kind(8), nn.ReLU())


def case(model, x, size):
    return {"model": model, "data": list(x.split(size))}


def loop(monitor, model, x, size=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with monitor(model, optimizer):
        for batch in x if size is None else x.split(size):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


SICK = {
    "two examples": lambda: case(dense(), torch.randn(64, 6), 2),
    "four examples": lambda: case(dense(), torch.randn(64, 6), 4),
    "two images of alike pixels": lambda: case(convolution(), images(32, 3.0), 2),
    "one image of alike pixels": lambda: case(convolution(), images(32, 3.0), 1),
    "ghost batches of two": lambda: case(
        nn.Sequential(nn.Linear(6, 16), bn.GhostBatchNorm(16, virtual_batch_size=2)), torch.randn(256, 6), 32
    ),
}
HEALTHY = {
    "32 examples": lambda: case(dense(), torch.randn(256, 6), 32),
    "two images of many different pixels": lambda: case(convolution(), images(32), 2),
    "evaluation mode": lambda: case(dense().eval(), torch.randn(64, 6), 2),
    "renormalised": lambda: case(dense(bn.BatchRenorm), torch.randn(64, 6), 2),
    "frozen": lambda: case(bn.freeze(dense())[0], torch.randn(64, 6), 2),
    "too few batches to tell": lambda: case(dense(), torch.randn(4, 6), 2),
    "large batches that are sorted": lambda: case(dense(), torch.randn(256, 6).sort(0).values, 32),
    "no BN": lambda: case(nn.Linear(6, 1), torch.randn(64, 6), 2),
}
SICK_RUNS = {
    "two examples": lambda monitor: loop(monitor, dense(), torch.randn(32, 6), 2),
    "two images of alike pixels": lambda monitor: loop(monitor, convolution(), images(16, 3.0), 2),
    "one image of alike pixels": lambda monitor: loop(monitor, convolution(), images(60, 3.0), 1),
}
HEALTHY_RUNS = {
    "32 examples, and a last batch of four in every epoch": lambda monitor: loop(
        monitor, dense(), [*torch.randn(68, 6).split(32)] * 5
    ),
    "two images of many different pixels": lambda monitor: loop(monitor, convolution(), images(16), 2),
    "one image of many different pixels": lambda monitor: loop(monitor, convolution(), images(60), 1),
    "renormalised": lambda monitor: loop(monitor, dense(bn.BatchRenorm), torch.randn(32, 6), 2),
}
