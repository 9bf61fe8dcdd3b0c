"""BN207, after flax#1491 and keras#18795: inputs far from zero, whose variance drowns in the square of their mean."""

import torch
from torch import nn

import batchnorm as bn


def images(mean=0.0, scale=1.0, channels=32, layout=torch.contiguous_format):
    return (scale * torch.randn(8, channels, 6, 6) + mean).contiguous(memory_format=layout)


def case(x, model=None, **more):
    return {"model": model or nn.Sequential(nn.BatchNorm2d(x.shape[1])), "example": x, **more}


def one_channel():
    x = images()
    x[:, 5] += 3e6
    return case(x, data=[x, images()])


class Swish(nn.BatchNorm2d):
    """A layer of a user's class."""

    def forward(self, x):
        return nn.functional.silu(super().forward(x))


NO_FIX = ("a class of its own",)
SICK = {
    "a mean of a million": lambda: case(images(3e6)),
    "channels last": lambda: case(images(1e6, layout=torch.channels_last)),
    "one channel": one_channel,
    "squares overflow": lambda: case(images(scale=1e20)),
    "vectors": lambda: case(torch.randn(64, 32) + 1e6, nn.Sequential(nn.BatchNorm1d(32))),
    "a class of its own": lambda: case(images(3e6), nn.Sequential(Swish(32))),
}
HEALTHY = {
    "a mean of a hundred": lambda: case(images(100.0)),
    "a mean of a thousand": lambda: case(images(1e3)),
    "large, but about zero": lambda: case(images(scale=1e6)),
    "layers of ours": lambda: case(images(3e6), nn.Sequential(bn.BatchNorm2d(32))),
    "layers of ours, squares overflow": lambda: case(images(scale=1e18), nn.Sequential(bn.BatchNorm2d(32))),
    "evaluation mode": lambda: case(images(3e6), nn.Sequential(nn.BatchNorm2d(32)).eval()),
    "a constant channel": lambda: case(torch.full((4, 3, 5, 5), 7.0)),
    "double precision": lambda: case(images(3e6).double(), nn.Sequential(nn.BatchNorm2d(32)).double()),
    "no BN": lambda: case(images(3e6), nn.Sequential(nn.ReLU())),
}
