"""How a network's weights begin: the standard deviation of each named scheme."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchnorm.errors import BatchNormError

SCHEMES: dict[str, Callable[[int, int], float]] = {
    "xavier": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "he": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "lecun": lambda fan_in, fan_out: math.sqrt(1 / fan_in),
    "small-gaussian": lambda fan_in, fan_out: 0.01,
}


def deviation(scheme: str, fan_in: int, fan_out: int) -> float:
    """Give the standard deviation a scheme prescribes for a layer.

    >>> deviation("he", fan_in=50, fan_out=7)
    0.2
    """
    if scheme not in SCHEMES:
        raise BatchNormError(f"there is no initialisation {scheme!r}", do=f"choose one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme](fan_in, fan_out)
