"""Percentiles: the 15th, 50th and 85th of a signal's values, as in Figure 1 of the paper."""

from __future__ import annotations

import torch

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal

RANKS = (0.15, 0.5, 0.85)


def read(signal: Signal) -> Reading | None:
    """Rank the values; NaN if one of them is.

    >>> read(Signal("act", torch.nn.ReLU(), "relu", "input", torch.arange(101.0))).samples
    (15.0, 50.0, 85.0)
    """
    if not len(signal.values):
        return None
    found = torch.quantile(signal.values.double(), torch.tensor(RANKS, dtype=torch.float64))
    return Reading(tuple(found.tolist()))


QUANTITY = Quantity("percentiles", "signal", read)
