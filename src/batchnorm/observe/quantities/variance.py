"""Variance: of all values of a signal about their common mean (not within channels), divided by their number."""

from __future__ import annotations

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal


def read(signal: Signal) -> Reading | None:
    """Take the variance.

    >>> import torch
    >>> read(Signal("act", torch.nn.ReLU(), "relu", "input", torch.tensor([[1.0, 3.0], [0.0, 4.0]]))).samples
    (2.5,)
    """
    return Reading((signal.variance,)) if signal.x.numel() else None


QUANTITY = Quantity("variance", "signal", read)
