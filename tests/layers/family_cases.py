"""What the tests of the family share: the names whose modules are here, and a network that is written once."""

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.layers.family import BRICKS

# A brick whose module is not there is skipped; it switches on by itself once it is.
NAMES = [
    pytest.param(name, marks=[] if brick.present() else pytest.mark.skip(f"{brick.home} is not here"))
    for name, brick in BRICKS.items()
]
POSITIONS = {0: (), 1: (7,), 2: (5, 6), 3: (2, 3, 4)}
CONV = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def needs(name, x):
    """What a brick's forward needs besides its input: one of them needs a mask (here without padding)."""
    return {"mask": torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)} if name == "masked" else {}


def built(name, channels=8, dims=2, **options):
    """A brick, and the layer before it where it needs one, as one module."""
    if name != "weight":
        return bn.make_norm(name, channels, dims, **options)
    before = nn.Conv2d(channels, channels, 1, bias=False) if dims == 2 else nn.Linear(channels, channels, bias=False)
    return nn.Sequential(before, bn.make_norm(name, channels, dims, of=before, **options))


class Net(nn.Module):
    """Two convolutions, each with a norm and an activation, the second with a shortcut; written once."""

    def __init__(self, norm, channels=8, classes=3, activation="relu", **options):
        super().__init__()
        self.conv1 = nn.Conv2d(2, channels, 3, padding=1, bias=False)
        self.norm1 = bn.make_norm(norm, channels, of=self.conv1, activation=activation, **options)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = bn.make_norm(norm, channels, of=self.conv2, activation=activation, **options)
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.norm1(self.conv1(x))
        x = self.norm2(self.conv2(x), residual=x)
        return self.head(x.mean((2, 3)))


def seen(net, x):
    """What the network makes of images without padding; one brick needs a mask that says so."""
    with bn.use_mask(net, torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)):
        return net(x)


def images(count=24, size=6, classes=3, seed=0):
    """Images that differ in direction and frequency of a wave, so that their moments do not tell the class."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(count) % classes
    across = torch.arange(size).float()
    waves = torch.stack([
        torch.sin(2.0 * across)[:, None].expand(size, size),
        torch.sin(2.0 * across)[None, :].expand(size, size),
        torch.sin(2.0 * (across[:, None] + across)),
    ])  # fmt: skip
    x = torch.stack([waves[target], -waves[target]], 1)
    return x + 0.2 * torch.randn(x.shape, generator=generator), target
