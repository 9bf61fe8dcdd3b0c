"""Histogram: how many of a signal's values fall into each of some equal bins.

The bins of a layer do not move during a run, so that frames of a moving picture fit each other. They are given
(``range=(-6, 6)``), or chosen at the first record: from the 0.5th to the 99.5th percentile of the values, as much
again on both sides, outward to round numbers, and for sigmoid, tanh and their like at least as far as their flat ends
reach and a bit more. ``low`` and ``high`` are in every record. Values that leave them later are counted in ``under``
and ``over``, NaN and infinities in ``nonfinite``; all counts together are the values looked at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchnorm.observe.quantities.saturation import ENDS
from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal

BINS = 60


def read(signal: Signal) -> Reading | None:
    """Count the values.

    >>> x = torch.tensor([[-7.0, -1.0, 0.5, 0.75, 9.0]])
    >>> reading = read(Signal("act", torch.nn.ReLU(), "relu", "input", x, kept={"range": (-2, 2), "bins": 4}))
    >>> reading.samples
    (0.0, 1.0, 2.0, 0.0)
    >>> reading.setting
    {'low': -2, 'high': 2, 'under': 1, 'over': 1, 'nonfinite': 0}
    """
    values = signal.values
    finite = values[values.isfinite()]
    if "range" not in signal.kept:
        if not len(finite):
            return None
        signal.kept["range"] = choose_range(finite, ENDS.get(signal.kind, lambda module: None)(signal.module))
    low, high = signal.kept["range"]
    counts, under, over = count(finite, low, high, signal.kept.get("bins", BINS))
    lost = len(values) - len(finite)
    return Reading(counts, {"low": low, "high": high, "under": under, "over": over, "nonfinite": lost})


def count(values: Tensor, low: float, high: float, bins: int) -> tuple[tuple[float, ...], int, int]:
    """Count finite values in equal bins, each without its upper edge but the last, and below and above them.

    >>> count(torch.tensor([0.0, 1.0, 1.0, 2.0, 3.0]), 0, 2, 2)
    ((1.0, 3.0), 0, 1)
    """
    under, over = int((values < low).sum()), int((values > high).sum())
    inside = values[(values >= low) & (values <= high)].double()
    places = ((inside - low) * (bins / (high - low))).long().clamp_(max=bins - 1)
    return tuple(float(n) for n in torch.bincount(places, minlength=bins).tolist()), under, over


def choose_range(values: Tensor, ends: tuple[float, float] | None = None) -> tuple[float, float]:
    """Choose the edges for a whole run from the values of its first record, all finite.

    >>> choose_range(torch.linspace(-0.5, 0.5, 1001)), choose_range(torch.linspace(-0.5, 0.5, 1001), (-4.6, 4.6))
    ((-1.6, 1.6), (-6.0, 6.0))
    """
    low, high = torch.quantile(values.double(), torch.tensor([0.005, 0.995], dtype=torch.float64)).tolist()
    room = (high - low) or abs(high) or 1.0
    low, high = low - room, high + room
    if ends is not None:
        beyond = 0.15 * (ends[1] - ends[0])
        low, high = min(low, ends[0] - beyond), max(high, ends[1] + beyond)
    step = _round_step((high - low) / 10)
    edges = math.floor(low / step) * step, math.ceil(high / step) * step
    return float(f"{edges[0]:.6g}"), float(f"{edges[1]:.6g}")  # 0.3, not 0.30000000000000004


def _round_step(about: float) -> float:
    """The largest of 1, 2, 5, 10, ... times a power of ten that is not above a number."""
    power = 10.0 ** math.floor(math.log10(about))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= about * (1 + 1e-9))


QUANTITY = Quantity("histogram", "signal", read)
