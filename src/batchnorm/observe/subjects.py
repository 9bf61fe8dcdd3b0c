"""The inputs of quantities: the signal of a layer, or its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.functional import moments
from batchnorm.masks import as_mask
from batchnorm.moments import Moments

SAMPLE = 16384  # values of a signal that are sorted and counted: a percentile is then off by less than 0.3 of a percent
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass
class Signal:
    """The tensor that arrived at a layer, or left it, in one call.

    >>> signal = Signal("act", nn.Sigmoid(), "sigmoid", "input", torch.tensor([[1.0, 3.0]]))
    >>> signal.values, signal.mean
    (tensor([1., 3.]), 2.0)

    ``values`` is a sample of large tensors, always at the same places; ``moments``, ``mean`` and ``variance`` are of
    all values. ``kept`` is a dictionary that stays with the layer for the whole run.
    """

    layer: str
    module: nn.Module
    kind: str
    at: str
    x: Tensor
    mask: Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def values(self) -> Tensor:
        """At most ``SAMPLE`` of the values, in one dimension, on the CPU; of a padded batch, those that count."""
        x = self.x.detach()
        places = sampled_places(x.numel())
        values = x.reshape(-1) if places is None else torch.take(x, places.to(x.device))
        if self.mask is not None:
            counts = as_mask(self.mask, x).unsqueeze(1).expand_as(x)
            values = values[counts.reshape(-1) if places is None else torch.take(counts, places.to(x.device))]
        return values.to("cpu", torch.float64 if x.dtype == torch.float64 else torch.float32)

    @cached_property
    def moments(self) -> Moments:
        """Count, mean and variance of every channel (axis 1)."""
        x = self.x.detach()
        return moments(x if x.dim() > 1 else x.reshape(-1, 1), mask=self.mask)

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return float(self.moments.mean.mean())

    @property
    def variance(self) -> float:
        """The variance of all values, about their common mean."""
        own = self.moments
        return float(own.var.mean() + own.mean.var(correction=0))


@dataclass(frozen=True)
class Weights:
    """The parameters that a module itself holds, and the learning rate of its weights (None: not known).

    >>> Weights("fc", dict(nn.Linear(2, 3).named_parameters()), 0.1).norm > 0
    True
    """

    layer: str
    parameters: Mapping[str, Tensor]
    learning_rate: float | None = None

    @property
    def norm(self) -> float | None:
        """The Euclidean norm of all that has two axes and more: weights, not biases, not gamma; None if none has."""
        return norm([p for p in self.parameters.values() if p.dim() > 1])


def norm(tensors: list[Tensor]) -> float | None:
    """The Euclidean norm of some tensors together; None of none.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    5.0
    """
    if not tensors:
        return None
    parts = [torch.linalg.vector_norm(t.detach(), dtype=_wide(t.dtype)).to("cpu", torch.float64) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack(parts)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=64)
def sampled_places(count: int, most: int = SAMPLE) -> Tensor | None:
    """Return which of ``count`` values are sampled, by index; None means all.

    >>> sampled_places(10), sampled_places(10, most=4)
    (None, tensor([0, 7, 4, 1]))

    The steps between them are of the golden ratio of the whole, and share no divisor with it: every channel, row and
    example gets its turn, and no value comes twice. Nothing is drawn at random, so no random generator is advanced.
    """
    if count <= most:
        return None
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) != 1:
        stride += 1
    return torch.arange(most) * stride % count
