"""Saturation: which share of a signal lies in the flat ends of a sigmoid, tanh, hard tanh or hard sigmoid.

Sigmoid and tanh are flat where they come within 1 % of an end of their range: there they have less than 4 % of their
steepest slope. The hard ones are flat where their slope is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from batchnorm.doctor.activations import FLAT
from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal

_SIGMOID = math.log((1 - FLAT) / FLAT)  # where a sigmoid is FLAT away from its end
ENDS: dict[str, Callable[[Any], tuple[float, float] | None]] = {
    "sigmoid": lambda module: (-_SIGMOID, _SIGMOID),
    "tanh": lambda module: (-_SIGMOID / 2, _SIGMOID / 2),
    "hardtanh": lambda module: (float(module.min_val), float(module.max_val)),
    "hardsigmoid": lambda module: (-3.0, 3.0),
}


def read(signal: Signal) -> Reading | None:
    """Look at what goes into a nonlinearity.

    >>> import torch
    >>> x = torch.tensor([[-5.0, 0.0, 1.0, 4.6]])
    >>> read(Signal("act", torch.nn.Sigmoid(), "sigmoid", "input", x)).samples
    (0.5,)
    """
    if signal.kind not in ENDS or signal.at != "input" or not len(signal.values):
        return None
    ends = ENDS[signal.kind](signal.module)
    assert ends is not None
    values = signal.values
    return Reading((float(((values <= ends[0]) | (values >= ends[1])).float().mean()),))


QUANTITY = Quantity("saturation", "signal", read)
