"""How a network's weights begin: one named scheme, one random stream per member of a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError

SMALL = 0.01

SCHEMES: dict[str, Callable[[int, int], float]] = {
    "xavier": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "he": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "lecun": lambda fan_in, fan_out: math.sqrt(1 / fan_in),
    "small-gaussian": lambda fan_in, fan_out: SMALL,
}


def deviation(scheme: str, fan_in: int, fan_out: int) -> float:
    """Give the standard deviation a scheme prescribes for a layer.

    >>> deviation("he", fan_in=50, fan_out=7)
    0.2
    """
    if scheme not in SCHEMES:
        raise BatchNormError(f"there is no initialisation {scheme!r}", do=f"choose one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme](fan_in, fan_out)


def draw(
    streams: Sequence[torch.Generator], outputs: int, inputs: int, kernel: int, scheme: str, copies: int = 1
) -> Tensor:
    """Draw the stacked Gaussian weights of a convolution, each member from its own stream.

    >>> streams = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1)]
    >>> weights = draw(streams, outputs=4, inputs=3, kernel=1, scheme="xavier")
    >>> weights.shape, torch.equal(weights[:4], weights[8:])
    (torch.Size([12, 3, 1, 1]), True)

    ``copies`` convolutions of one shape come side by side; each is scaled as the single convolution it is.
    """
    scale = deviation(scheme, inputs * kernel**2, outputs * kernel**2)
    shape = (copies * outputs, inputs, kernel, kernel)
    return torch.cat([torch.randn(shape, generator=stream) for stream in streams]) * scale
