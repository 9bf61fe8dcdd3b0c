"""The color and the dash of each variant of the race, the same in every chart."""

from __future__ import annotations

from batchnorm.lab.variants import BASELINE, RAISED_RATE, SAME_RATE, SIGMOID
from batchnorm.report.palette import look_of

VARIANTS = {
    BASELINE: ("ink", "dash"),
    SAME_RATE: ("sky", "solid"),
    RAISED_RATE: ("blue", "longdash"),
    "BN-x30": ("green", "dashdot"),
    "BN-x5-Sigmoid": ("orange", "solid"),
    SIGMOID: ("vermillion", "dot"),
}


def look_of_variant(name: str) -> tuple[str, str]:
    """Give the color and the dash of a variant.

    >>> look_of_variant("BN-x5")
    ('blue', 'longdash')
    """
    return VARIANTS.get(name, look_of(0))
