"""Who has which colour and dash. The names are those of Okabe and Ito's palette, which colour-blind eyes tell apart."""

from __future__ import annotations

from batchnorm.lab.variants import BASELINE, RAISED_RATE, SAME_RATE, SIGMOID

NAMES = ("blue", "orange", "green", "vermillion", "purple", "sky", "ink")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

# The colours of maps, from low to high, each with its share of the way. Cividis is as colour-blind eyes see it, too;
# where values part at 0, blue and orange part from a grey that shows on white and on black.
CIVIDIS = tuple(
    (round(number / 9, 4), colour)
    for number, colour in enumerate(
        ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]
    )
)
BLUE_TO_ORANGE = ((0.0, "#0b4f8a"), (0.25, "#5b9bd0"), (0.5, "#b9bfc6"), (0.75, "#e0a04a"), (1.0, "#a04a00"))

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
