"""Fully connected networks with any norm: `Layered` with its norms exchanged, for what the claims compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.lab.networks.layered import Layered
from batchnorm.layers.batch import BatchNorm1d

Norm = Callable[[int], nn.Module]


class Bias(nn.Module):
    """A bias for each unit, 0 at the start: what stands in the place of a norm where there is none.

    >>> Bias(2)(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, width: int) -> None:
        """Begin at 0."""
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return x + self.bias


def normed(seed: int, norm: Norm = BatchNorm1d, **options: Any) -> Layered:
    """Return a `Layered` network with ``norm(width)`` in front of every nonlinearity.

    >>> from functools import partial
    >>> network = normed(0, partial(BatchNorm1d, affine=False), inputs=64, width=8, layers=2, activation="relu")
    >>> [norm.affine for norm in network.norms]
    [False, False]

    The weights depend on the seed alone. Linear layers but the last have no bias.
    """
    network = Layered(seed, normalised=True, **options)
    network.norms = nn.ModuleList(norm(linear.out_features) for linear in network.linears[:-1])  # type: ignore[arg-type]
    return network
