"""Mean: of all values of a signal, not of a sample."""

from __future__ import annotations

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal


def read(signal: Signal) -> Reading | None:
    """Take the mean.

    >>> import torch
    >>> read(Signal("act", torch.nn.ReLU(), "relu", "input", torch.tensor([[1.0, 3.0], [0.0, 4.0]]))).samples
    (2.0,)
    """
    return Reading((signal.mean,)) if signal.x.numel() else None


QUANTITY = Quantity("mean", "signal", read)
