"""BN201, after pytorch/pytorch#4741: a momentum so small that the running statistics stay near where they began."""

import torch
from torch import nn


def trained(momentum, steps=60):
    """A classifier of shifted blobs, after some steps of training, with its data."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16, momentum=momentum), nn.ReLU(), nn.Linear(16, 3)
    )
    labels = torch.arange(3).repeat(64)
    centres = 3 * torch.randn(3, 6, generator=generator) + 4
    x = centres[labels] + torch.randn(192, 6, generator=generator)
    order = torch.randperm(192, generator=generator)
    batches = list(zip(x[order].split(32), labels[order].split(32), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, batches


def case(momentum, labels=True):
    model, batches = trained(momentum)
    return {"model": model, "data": batches if labels else [x for x, _ in batches]}


SICK = {
    "momentum 0.001": lambda: case(0.001),
    "without labels": lambda: case(0.001, labels=False),
}
HEALTHY = {
    "momentum 0.1": lambda: case(0.1),
    "a cumulative average": lambda: case(None),
    "no running statistics": lambda: {
        "model": nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)),
        "data": list(torch.randn(4, 8, 2)),
    },
}
