"""BN101, after milesial/Pytorch-UNet#325: the convolutions of a U-Net kept biases that its BN layers cancel."""

import torch
from torch import nn


def double_convolution(bias):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
    )  # fmt: skip


def with_example(model, *shape):
    return {"model": model, "example": torch.randn(shape)}


SICK = {
    "convolution": lambda: with_example(double_convolution(True), 2, 3, 8, 8),
    "linear": lambda: with_example(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 8, 3),
    "transposed": lambda: with_example(nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4)), 2, 3, 4, 4),
}
HEALTHY = {
    "no bias": lambda: with_example(double_convolution(False), 2, 3, 8, 8),
    "an activation between": lambda: with_example(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4)), 8, 3),
    "a linear layer on another axis": lambda: with_example(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5)), 8, 5, 3),
}
