"""BN108, after keras#8794: the two sides of a siamese network share a BN layer, and do not see the same data."""

from functools import partial

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


class Sides(nn.Module):
    """One network for both sides of a pair."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, a, b):
        return self.body(a), self.body(b)


class Both(nn.Module):
    """Runs a network beside the main path."""

    def __init__(self, beside):
        super().__init__()
        self.beside = beside

    def forward(self, x):
        self.beside(x)
        return x


class Projector(nn.Sequential):
    """A convolutional encoder with the projector of Barlow Twins, which ends in BN without gamma and beta."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16, bias=False),
            nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16, affine=False),
        )  # fmt: skip


def rows():
    """BN on the pixels themselves, most of which are black in most pictures."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144))


def sparse(n):
    return (torch.rand(n, 1, 12, 12) < 0.3) * torch.rand(n, 1, 12, 12)


def drawings(n):
    """A bright stroke at a random place of a black picture; hardly any reaches the border."""
    x = torch.zeros(n, 1, 12, 12)
    for image in x:
        top, left = (int(v) for v in torch.randint(2, 7, (2,)))
        image[:, top : top + 4, left : left + 3] = torch.rand(4, 3)
    return x


def augmented(x):
    """Each picture moved a little, mirrored or not, brighter or darker."""
    moved = [image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2)) for image in x]
    moved = [image.flip(2) if torch.rand(()) < 0.5 else image for image in moved]
    return torch.stack(moved) * (0.6 + 0.8 * torch.rand(len(x), 1, 1, 1))


def views(n):
    x = drawings(n)
    return {"model": Sides(nn.Sequential(Both(rows()), Projector())), "example": (augmented(x), augmented(x))}


def halves(n):
    x = drawings(2 * n)
    return {"model": Sides(rows()), "example": (x[:n], x[n:])}


SICK = {
    "other means": lambda: pair(Siamese(), shift=3.0),
    "other variances": lambda: pair(Siamese(), scale=5.0),
    "ours": lambda: pair(Siamese(bn.BatchNorm1d), shift=3.0),
    "steps in time": lambda: {"model": Steps(nn.BatchNorm1d(5)), "example": torch.randn(32, 5)},
    "levels of a pyramid": lambda: {"model": Pyramid(), "example": 2 + torch.randn(8, 3, 24, 24)},
    "batches": lambda: batches(Siamese(), 3.0),
    "two domains of sparse inputs": lambda: {"model": Sides(rows()), "example": (sparse(64), 1.5 * sparse(64) + 0.3)},
    "two domains through an encoder": lambda: {
        "model": Sides(Projector()),
        "example": (drawings(64), 1 - drawings(64)),
    },
    "a channel that one side never fires": lambda: {
        "model": Siamese(),
        "example": (torch.randn(64, 5), torch.randn(64, 5) * torch.tensor([0.0, 1, 1, 1, 1]) + 1),
    },
    "an encoder, too few to tell": lambda: pair(Encoder(), shift=30.0, scale=9.0, n=2),
    "too few to tell": lambda: pair(Siamese(), shift=3.0, n=2),
}
HEALTHY = {
    "one each": lambda: pair(Apart(), shift=3.0),
    "no running statistics": lambda: pair(Siamese(lambda c: nn.BatchNorm1d(c, track_running_stats=False)), shift=3.0),
    "frozen": lambda: pair(Siamese(bn.FrozenBatchNorm), shift=3.0),
    "domains": lambda: pair(Domains(), shift=3.0),
    "the same distribution": lambda: pair(Siamese()),
    "an encoder called twice": lambda: pair(Encoder()),
    "apart by chance": lambda: pair(Siamese(), n=5),
    **{f"two views of the same {n} images": partial(views, n) for n in (4, 8, 32)},
    **{f"halves of one data set, {n} and {n}": partial(halves, n) for n in (4, 8, 32)},
    "views in batches": lambda: {
        "model": Sides(Projector()),
        "data": [views(16)["example"] for _ in range(3)],
        "forward": lambda m, batch: m(*batch),
    },
    "a channel that hardly ever fires": lambda: {
        "model": Sides(nn.BatchNorm1d(40)),
        "example": tuple((torch.rand(2, 32, 40) < 0.02).float()),
    },
    "layer norm": lambda: pair(Siamese(nn.LayerNorm), shift=3.0),
    "one call": lambda: {"model": nn.Sequential(nn.BatchNorm1d(5)), "example": torch.randn(8, 5)},
}


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, a, b):
        return self.a(a) + self.b(b)
