"""The networks that `batchnorm lab run train` knows: one table, a line each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from batchnorm.lab.networks.conv_residual import ConvResidual
from batchnorm.lab.networks.layered import Layered
from batchnorm.lab.networks.residual import Residual

Build = Callable[[int, str, int, int, tuple[int, ...], int], nn.Module]


def residual(seed: int, norm: str, depth: int, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Fully connected residual blocks, as in the race."""
    return Residual(
        seed, blocks=depth, width=width, norm="ours" if norm == "batch" else norm, inputs=_size(shape), classes=classes
    )


def conv(seed: int, norm: str, depth: int, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Convolutional residual blocks, ``depth`` of them in each of three stages."""
    return ConvResidual(seed, blocks=depth, width=width, norm=norm, channels=shape[0], classes=classes)


def sigmoid(seed: int, norm: str, depth: int, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Layers of sigmoids, as in Figure 1 of the paper."""
    return Layered(
        seed,
        normalised=norm == "batch",
        init="xavier",
        inputs=_size(shape),
        width=width,
        layers=depth,
        classes=classes,
    )


NETWORKS: dict[str, tuple[Build, tuple[str, ...]]] = {
    "residual": (residual, ("batch", "torch", "none")),
    "conv": (conv, ("batch", "torch", "none", "group", "layer", "instance", "rms", "renorm", "ghost", "weight", "dyt")),
    "sigmoid": (sigmoid, ("batch", "none")),
}
"""Each network: the function that builds it, and the norms it takes."""


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size
