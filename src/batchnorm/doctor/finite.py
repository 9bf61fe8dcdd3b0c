"""NaN and infinite values in tensors of any type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


class NotFinite(NamedTuple):
    """How many values of a tensor are NaN, and how many infinite."""

    nan: int
    infinite: int


def not_finite(tensor: Tensor) -> NotFinite:
    """Count the NaN and the infinite values of a tensor; none in a tensor whose values cannot be read.

    >>> not_finite(torch.tensor([float("nan"), 1.0, float("inf")]))
    NotFinite(nan=1, infinite=1)
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return NotFinite(0, 0)
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return NotFinite(0, 0)
    values = tensor.detach()
    values = values.float() if values.element_size() < 2 else values
    if bool(values.isfinite().all()):
        return NotFinite(0, 0)
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    return NotFinite(nan, infinite)


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor has nothing but zeros and infinities: an attention mask, or the extremes of an unused observer.

    >>> is_mask(torch.tensor([0.0, float("-inf")])), is_mask(torch.tensor([1.0, float("-inf")]))
    (True, False)
    """
    values = tensor.detach()
    values = values.float() if values.is_floating_point() and values.element_size() < 2 else values
    return bool((values.isinf() | (values == 0)).all())
