"""Who has which colour and dash. The names are those of Okabe and Ito's palette, which colour-blind eyes tell apart."""

from __future__ import annotations

from batchnorm.lab.variants import BASELINE, RAISED_RATE, SAME_RATE, SIGMOID

NAMES = ("blue", "orange", "green", "vermillion", "purple", "sky", "ink")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

# A dash besides a colour: lines are told apart in grey, too.
VARIANTS = {
    BASELINE: ("ink", "dash"),
    SAME_RATE: ("sky", "solid"),
    RAISED_RATE: ("blue", "longdash"),
    "BN-x30": ("green", "dashdot"),
    "BN-x5-Sigmoid": ("orange", "solid"),
    SIGMOID: ("vermillion", "dot"),
}


def look_of(name: str, number: int = 0) -> tuple[str, str]:
    """Give the colour and the dash of a line.

    >>> look_of("BN-x5"), look_of("another", number=8)
    (('blue', 'longdash'), ('orange', 'dash'))
    """
    return VARIANTS.get(name, (NAMES[number % len(NAMES)], DASHES[number // len(NAMES) % len(DASHES)]))
