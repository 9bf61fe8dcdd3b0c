"""The color of each network, the same in every figure of watched records."""

from __future__ import annotations

PLAIN, BN = "without BN", "with BN"
COLORS = {PLAIN: "vermillion", BN: "blue"}
OTHERS = ("blue", "vermillion", "green", "orange", "purple", "sky")


def color_of(network: str, number: int) -> str:
    """Return the palette's name for the color of a network.

    >>> color_of("with BN", 0), color_of("another", 2)
    ('blue', 'green')
    """
    return COLORS.get(network, OTHERS[number % len(OTHERS)])
