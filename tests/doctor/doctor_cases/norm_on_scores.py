"""BN114: a softmax in front of BN; and BN as the last layer of a classifier."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


def classifier(*head):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5), *head)


def case(*head, **more):
    return {"model": classifier(*head), "example": torch.randn(32, 6), **more}


class Function(nn.Module):
    def __init__(self, function, norm):
        super().__init__()
        self.body, self.function, self.norm = classifier(), function, norm

    def forward(self, x):
        return self.norm(self.function(self.body(x)))


class Maps(nn.Module):
    """A segmentation network that normalises its maps of probabilities."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x).softmax(dim=1))


class Attention(nn.Module):
    """Its softmax weighs values, whose sum is normalised: as in LeViT."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return self.norm(y.transpose(1, 2))


class Gate(nn.Module):
    """A softmax over branches that is multiplied with them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.gate, self.norm = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 2), nn.BatchNorm1d(8)

    def forward(self, x):
        g = self.gate(x).softmax(1)
        return self.norm(g[:, :1] * self.a(x) + g[:, 1:] * self.b(x))


def blobs(n=600, classes=5):
    labels = torch.arange(n) % classes
    centres = 4 * torch.randn(classes, 6, generator=torch.Generator().manual_seed(1))
    return list(zip((centres[labels] + torch.randn(n, 6)).split(50), labels.split(50), strict=True))


def trained(*head, steps=120):
    """A classifier of blobs, and batches with labels."""
    model, batches = classifier(*head), blobs()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, labels = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return {"model": model.eval(), "data": batches}


SOFTMAX = partial(F.softmax, dim=1)
FUNCTIONS = {
    "written out": lambda x: x.exp() / x.exp().sum(1, keepdim=True),
    "written out safely": lambda x: torch.div(e := (x - x.amax(1, True)).exp(), torch.sum(e, 1, True)),
    "gumbel": F.gumbel_softmax,
    "softmin": partial(F.softmin, dim=1),
    "seen as another": lambda x: x[:, None].flatten(1).softmax(-1).view_as(x),
    "swapped": lambda x: x.softmax(-1).t().swapaxes(0, 1).type_as(x),
}
SICK = {
    "a module": lambda: case(nn.Softmax(1), nn.BatchNorm1d(5)),
    "a logarithm": lambda: case(nn.LogSoftmax(1), nn.BatchNorm1d(5)),
    "a function": lambda: {"model": Function(SOFTMAX, nn.BatchNorm1d(5)), "example": torch.randn(8, 6)},
    "a method": lambda: {"model": Function(lambda x: x.softmax(1), nn.BatchNorm1d(5)), "example": torch.randn(8, 6)},
    **{
        name: lambda function=function: {"model": Function(function, nn.BatchNorm1d(5)), "example": torch.randn(8, 6)}
        for name, function in FUNCTIONS.items()
    },
    "a Softmin": lambda: case(nn.Softmin(1), nn.BatchNorm1d(5)),
    "dropout in between": lambda: case(nn.Softmax(1), nn.Dropout(0.1), nn.BatchNorm1d(5)),
    "inside a network": lambda: case(nn.Softmax(1), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "ours": lambda: case(nn.Softmax(1), bn.BatchNorm1d(5)),
    "maps": lambda: {"model": Maps(), "example": torch.randn(4, 3, 8, 8)},
    "one example, in evaluation": lambda: {
        "model": classifier(nn.Softmax(1), nn.BatchNorm1d(5)).eval(), "example": torch.randn(1, 6)
    },
    "the last layer, with labels": lambda: trained(nn.BatchNorm1d(5, affine=False)),
    "the last but for a softmax": lambda: {**trained(nn.BatchNorm1d(5, affine=False)), "model": with_softmax()},
}  # fmt: skip
HEALTHY = {
    "in front of the softmax": lambda: case(nn.BatchNorm1d(5), nn.Softmax(1)),
    "no softmax": case,
    "a sigmoid": lambda: case(nn.Sigmoid(), nn.BatchNorm1d(5)),
    "a linear layer in between": lambda: case(nn.Softmax(1), nn.Linear(5, 5), nn.BatchNorm1d(5)),
    "attention": lambda: {"model": Attention(), "example": torch.randn(4, 6, 8)},
    "shares of something else": lambda: {
        "model": Function(lambda x: x.relu() / (1 + x.relu().sum(1, keepdim=True)), nn.BatchNorm1d(5)),
        "example": torch.randn(8, 6),
    },
    "a gate": lambda: {"model": Gate(), "example": torch.randn(16, 6)},
    "the last layer, without labels": lambda: case(nn.BatchNorm1d(5)),
    "features with labels": lambda: {
        "model": nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, affine=False)), "data": blobs()
    },
    "the last layer, and gamma has grown": lambda: grown(),
    "a classifier": trained,
    "a layer norm": lambda: case(nn.Softmax(1), nn.LayerNorm(5)),
}  # fmt: skip


def with_softmax():
    return nn.Sequential(*trained(nn.BatchNorm1d(5, affine=False))["model"], nn.Softmax(1))


def grown():
    arguments = trained(nn.BatchNorm1d(5))
    with torch.no_grad():
        arguments["model"][4].weight.fill_(8.0)
    return arguments
