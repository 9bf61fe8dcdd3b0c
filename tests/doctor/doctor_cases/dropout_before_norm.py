"""BN112, after Li et al. (2019): dropout in front of BN, directly or with a layer that mixes channels in between."""

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


def rows(*layers, n=256):
    return {"model": nn.Sequential(*layers), "example": torch.randn(n, 8)}


def images(*layers, n=8):
    return {"model": nn.Sequential(*layers), "example": torch.randn(n, 3, 16, 16)}


class Functional(nn.Module):
    """A layer of DenseNet: dropout by a function, if there is a rate at all."""

    def __init__(self, p):
        super().__init__()
        self.conv, self.norm, self.p = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(11), p

    def forward(self, x):
        y = self.conv(F.pad(x, (1, 1, 1, 1)).relu())
        if self.p is not None:
            y = F.dropout(y, self.p, training=self.training)
        return self.norm(torch.cat([x, y], 1))


class Rare(nn.Module):
    """Dropout reaches two of thirty channels, whose threshold only doubled values exceed."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(30)

    def forward(self, x):
        rare = (self.drop(x[:, :2].tanh()) - 0.998).relu() + 1e-4 * x[:, :2]
        return self.norm(torch.cat([rare, x.repeat(1, 4)[:, :28]], 1))


SICK = {
    "directly": lambda: rows(nn.Dropout(0.5), nn.BatchNorm1d(8)),
    "a linear layer between": lambda: rows(nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "a convolution between": lambda: images(
        nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    ),
    "ours": lambda: rows(nn.Dropout(0.5), bn.BatchNorm1d(8)),
    "a function": lambda: {"model": Functional(0.5), "example": torch.randn(8, 3, 8, 8)},
    "a little": lambda: rows(nn.Dropout(0.1), nn.BatchNorm1d(8), n=2048),
    "batches of data": lambda: {
        "model": nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8)), "data": list(torch.randn(3, 128, 8))
    },
    "one example, whose last map is a pixel": lambda: images(
        nn.Dropout(0.5), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), n=1
    ),
    "behind an activation that hardly ever fires": lambda: {"model": Rare(), "example": torch.randn(256, 8)},
}  # fmt: skip
HEALTHY = {
    "behind the norm": lambda: rows(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)),
    "a rate of zero": lambda: rows(nn.Dropout(0.0), nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "DenseNet without dropout": lambda: {"model": Functional(None), "example": torch.randn(8, 3, 8, 8)},
    "a function that drops nothing": lambda: {"model": Functional(0.0), "example": torch.randn(8, 3, 8, 8)},
    "another norm between": lambda: rows(nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "frozen": lambda: rows(nn.Dropout(0.5), bn.FrozenBatchNorm(8)),
    "no running statistics": lambda: rows(nn.Dropout(0.5), nn.BatchNorm1d(8, track_running_stats=False)),
    "too few values to tell": lambda: rows(nn.Dropout(0.1), nn.Linear(8, 8), nn.BatchNorm1d(8), n=4),
}
