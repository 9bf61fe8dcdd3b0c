"""Colors, dashes and color scales of charts, from the palette of Okabe and Ito, which color-blind eyes tell apart."""

from __future__ import annotations

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


def look_of(number: int) -> tuple[str, str]:
    """Give the color and the dash of the line with this number; a dash tells lines apart in grey, too.

    >>> look_of(0), look_of(8)
    (('blue', 'solid'), ('orange', 'dash'))
    """
    return NAMES[number % len(NAMES)], DASHES[number // len(NAMES) % len(DASHES)]
