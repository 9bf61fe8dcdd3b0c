"""The contenders of the race, with what the paper reports of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Paper:
    """A row of Figure 3 of Ioffe & Szegedy (2015), measured on ImageNet by its authors."""

    steps: str
    ratio: str
    accuracy: str


@dataclass(frozen=True)
class Variant:
    """A network and how it gets its learning rate: a factor of the baseline's, or by a sweep (None)."""

    name: str
    normalised: bool
    activation: str
    factor: float | None
    paper: Paper


BASELINE = "Inception"
SAME_RATE = "BN-Baseline"
RAISED_RATE = "BN-x5"  # the rate of the paper's headline, 14 times fewer steps
SIGMOID = "Sigmoid"

VARIANTS = (
    Variant(BASELINE, False, "relu", None, Paper("31.0M", "1", "72.2%")),
    Variant(SAME_RATE, True, "relu", 1, Paper("13.3M", "2.3x", "72.7%")),
    Variant(RAISED_RATE, True, "relu", 5, Paper("2.1M", "14.8x", "73.0%")),
    Variant("BN-x30", True, "relu", 30, Paper("2.7M", "11.5x", "74.8%")),
    Variant("BN-x5-Sigmoid", True, "sigmoid", 5, Paper("-", "-", "69.8%")),
    Variant(SIGMOID, False, "sigmoid", None, Paper("-", "-", "chance")),
)

PAPER_TARGET = "72.2%"


def stacks() -> Iterator[tuple[Variant, ...]]:
    """Group the variants that are one network at several learning rates: those train as one stack.

    >>> [[variant.name for variant in stack] for stack in stacks()][1]
    ['BN-Baseline', 'BN-x5', 'BN-x30']
    """
    for _, group in groupby(VARIANTS, key=lambda variant: (variant.normalised, variant.activation)):
        yield tuple(group)


def named(name: str) -> Variant:
    """Look a variant up.

    >>> named("BN-x5").factor
    5
    """
    return next(variant for variant in VARIANTS if variant.name == name)
