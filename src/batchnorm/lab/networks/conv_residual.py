"""A convolutional residual network for small images, with any norm of the family, SkipInit or none."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from batchnorm.layers.family import make_norm

STAGES = 3  # each but the first halves the image and doubles the channels


class ConvResidual(nn.Module):
    """A 3x3 convolution, three stages of residual blocks of two 3x3 convolutions each, the mean, a linear read-out.

    >>> ConvResidual(seed=0, blocks=1, width=8)(torch.zeros(2, 1, 14, 14)).shape
    torch.Size([2, 10])

    ``h = relu(h + s n(W2 relu(n(W1 h))))`` with ``norm`` any name of `batchnorm.make_norm`, "torch", or "none", which
    is a bias. ``s`` is 1, or with ``skip_init`` a learned scalar that begins at 0. ``blocks`` are those of one stage.
    Weights are Gaussian with variance 2 / fan-in, the same ones whatever the norm.
    """

    def __init__(
        self,
        seed: int,
        *,
        blocks: int = 2,
        width: int = 16,
        norm: str = "batch",
        skip_init: bool = False,
        channels: int = 1,
        classes: int = 10,
    ) -> None:
        """Draw the weights from the seed."""
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        self.stem = Unit(stream, channels, width, 1, norm)
        rows = []
        inside = width
        for stage in range(STAGES):
            for block in range(blocks):
                outside = width << stage
                rows.append(ResidualBlock(stream, inside, outside, 2 if stage and not block else 1, norm, skip_init))
                inside = outside
        self.blocks = nn.Sequential(*rows)
        self.read_out = nn.Linear(inside, classes)
        with torch.no_grad():
            drawn = torch.randn(classes, inside, generator=stream)
            self.read_out.weight.copy_(drawn / math.sqrt(inside))
            self.read_out.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Score images (N, channels, height, width)."""
        return cast(Tensor, self.read_out(self.blocks(self.stem(x)).mean((2, 3))))


class Unit(nn.Module):
    """A convolution and its norm, then the sum with a residual, then ReLU."""

    def __init__(self, stream: torch.Generator, inputs: int, outputs: int, stride: int, norm: str) -> None:
        """Draw the weights from the stream."""
        super().__init__()
        with torch.device("meta"):  # draws nothing from the global stream
            conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=norm == "none")
        self.conv = conv.to_empty(device="cpu")
        with torch.no_grad():
            drawn = torch.randn(self.conv.weight.shape, generator=stream)
            self.conv.weight.copy_(drawn * math.sqrt(2 / (9 * inputs)))
            if self.conv.bias is not None:
                self.conv.bias.zero_()
        self.torchs = norm == "torch"
        self.norm = (
            nn.BatchNorm2d(outputs) if self.torchs else make_norm(norm, outputs, of=self.conv, activation="relu")
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply them in one pass where the norm can."""
        z = self.conv(x)
        if not self.torchs:
            return cast(Tensor, self.norm(z, residual=residual))
        z = self.norm(z)
        return torch.relu(z if residual is None else z + residual)


class ResidualBlock(nn.Module):
    """A residual block; where the size changes, the shortcut is every other position, padded with channels of 0."""

    def __init__(
        self, stream: torch.Generator, inputs: int, outputs: int, stride: int, norm: str, skip_init: bool
    ) -> None:
        """Draw the weights from the stream."""
        super().__init__()
        self.first = Unit(stream, inputs, outputs, stride, norm)
        self.second = Unit(stream, outputs, outputs, 1, norm)
        self.scale = nn.Parameter(torch.zeros(())) if skip_init else None
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the shortcut."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.more:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.more))
        branch = self.first(x)
        if self.scale is None:
            return cast(Tensor, self.second(branch, shortcut))
        return torch.relu(shortcut + self.scale * self.second.conv(branch))
