"""BN108, after keras#8794: the two sides of a siamese network share a BN layer, and do not see the same data."""

import torch
from torch import nn

import batchnorm as bn


class Siamese(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d, times=2):
        super().__init__()
        self.norms = nn.ModuleList([norm(5)] * times)

    def forward(self, *inputs):
        return sum(norm(x) for norm, x in zip(self.norms, inputs, strict=True))


class Steps(nn.Module):
    """A cell whose hidden state grows with the steps; one BN layer for all of them."""

    def __init__(self, norm):
        super().__init__()
        self.cell, self.norm = nn.Linear(5, 5, bias=False), norm

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(4):
            h = h + x
            self.norm(h)
        return h


class Pyramid(nn.Module):
    """One head over the levels of a pyramid."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))

    def forward(self, x):
        return [self.head(s * nn.functional.avg_pool2d(x, s)) for s in (1, 2, 4)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5))

    def forward(self, a, b):
        return self.body(a) - self.body(b)


def pair(model, shift=0.0, scale=1.0, n=64):
    return {"model": model, "example": (torch.randn(n, 5), scale * torch.randn(n, 5) + shift)}


def batches(model, shift):
    return {
        "model": model, "data": [torch.randn(2, 16, 5) + torch.tensor([0.0, shift]).view(2, 1, 1) for _ in range(3)],
        "forward": lambda m, batch: m(*batch),
    }  # fmt: skip


class Domains(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = bn.DomainBatchNorm(5, domains=("a", "b"))

    def forward(self, a, b):
        return self.norm(a, domain="a") + self.norm(b, domain="b")


SICK = {
    "other means": lambda: pair(Siamese(), shift=3.0),
    "other variances": lambda: pair(Siamese(), scale=5.0),
    "ours": lambda: pair(Siamese(bn.BatchNorm1d), shift=3.0),
    "steps in time": lambda: {"model": Steps(nn.BatchNorm1d(5)), "example": torch.randn(32, 5)},
    "levels of a pyramid": lambda: {"model": Pyramid(), "example": 2 + torch.randn(8, 3, 24, 24)},
    "batches": lambda: batches(Siamese(), 3.0),
    "the same distribution": lambda: pair(Siamese()),
    "an encoder called twice": lambda: pair(Encoder()),
    "apart by chance": lambda: pair(Siamese(), n=5),
    "too few to tell": lambda: pair(Siamese(), shift=3.0, n=2),
}
HEALTHY = {
    "one each": lambda: pair(Apart(), shift=3.0),
    "no running statistics": lambda: pair(Siamese(lambda c: nn.BatchNorm1d(c, track_running_stats=False)), shift=3.0),
    "frozen": lambda: pair(Siamese(bn.FrozenBatchNorm), shift=3.0),
    "domains": lambda: pair(Domains(), shift=3.0),
    "layer norm": lambda: pair(Siamese(nn.LayerNorm), shift=3.0),
    "one call": lambda: {"model": nn.Sequential(nn.BatchNorm1d(5)), "example": torch.randn(8, 5)},
}


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, a, b):
        return self.a(a) + self.b(b)
