"""What the race compares, and the settings of a race."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from batchnorm.errors import BatchNormError

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
SIGMOID_RATES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # only to show whether it trains: wider apart, and higher
DEPTHS = (2, 6, 10, 14, 18)
HEADLINE = 10  # blocks
TUNING_SEEDS = (1000, 1001, 1002)  # on these, rates are chosen; never reported
PAPER_RATIO, PAPER_ARM = 14.8, "BN x5"
STAGES = 3  # of the convolutional networks
SMALL, MEDIUM = "small", "medium"
SIZES: dict[str, dict[str, Any]] = {
    SMALL: {},
    MEDIUM: {
        "size": MEDIUM,
        "seeds": 3,
        "steps": 600,
        "every": 25,
        "rates": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        "depths": (3, 6, 9),
        "width": 8,
        "momentum": 0.9,
        "smoothed_over": 3,
    },
}
"""What each size of the race has in place of the defaults."""


@dataclass(frozen=True)
class Arm:
    """One way to build and train the residual network.

    Its learning rate is ``factor`` times the plain network's best, or its own best of a grid (``factor`` None).
    """

    name: str
    norm: str = "ours"
    activation: str = "relu"
    factor: float | None = None
    skip_init: bool = False
    clip: float | None = None
    headline_only: bool = False  # runs at one depth, not at all of them


PLAIN = Arm("without BN", norm="none")
NORMALISED = (Arm("BN x1", factor=1), Arm("BN x5", factor=5), Arm("BN x30", factor=30))
RAISED_PLAIN = Arm("without BN x5", norm="none", factor=5, headline_only=True)
SKIP_INIT = Arm("SkipInit", norm="none", skip_init=True, headline_only=True)
CLIPPING = Arm("clipping", norm="none", clip=1.0, headline_only=True)
SIGMOID = Arm("BN x5, sigmoid", activation="sigmoid", factor=5, headline_only=True)
PLAIN_SIGMOID = Arm("sigmoid, no BN", norm="none", activation="sigmoid", headline_only=True)
SHARE = 0.95  # of the plain network's best: the second target
SOONEST = {  # with --strict: the plain network at the rate that is soonest at each target on the tuning seeds
    1.0: Arm("without BN, soonest at its best", norm="none"),
    SHARE: Arm("without BN, soonest at 95% of it", norm="none"),
}
ARMS = (PLAIN, *NORMALISED, SKIP_INIT, CLIPPING, SIGMOID, PLAIN_SIGMOID, RAISED_PLAIN, *SOONEST.values())
SWEPT = (SKIP_INIT, CLIPPING, PLAIN_SIGMOID)

NOTES = {
    SKIP_INIT.name: "a scalar per branch",
    CLIPPING.name: "gradient norm <= 1",
}
PAPER_NAMES = {
    PLAIN.name: "Inception",
    "BN x1": "BN-Baseline",
    "BN x5": "BN-x5",
    "BN x30": "BN-x30",
    SIGMOID.name: "BN-x5-Sigmoid",
    PLAIN_SIGMOID.name: "Sigmoid",
}


def arm_named(name: str) -> Arm:
    """Look an arm up.

    >>> arm_named("BN x5").factor
    5
    """
    return next(arm for arm in ARMS if arm.name == name)


@dataclass(frozen=True)
class DepthSettings:
    """The settings of the race of residual networks.

    >>> DepthSettings().headline
    10
    >>> DepthSettings(seeds=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --seeds is 0; give a whole number from 1 up
    """

    seeds: int = 5
    steps: int = 1500
    batch_size: int = 32
    every: int = 10
    rates: tuple[float, ...] = RATES
    sigmoid_rates: tuple[float, ...] = SIGMOID_RATES
    depths: tuple[int, ...] = DEPTHS
    width: int = 32
    smoothed_over: int = 5  # validations
    strict: bool = False  # whether the plain network's rate is chosen anew for each target
    size: str = SMALL
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise for settings that cannot be run."""
        for name in ("seeds", "steps", "batch_size", "every"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise BatchNormError(f"--{flag} is {getattr(self, name)}", do="give a whole number from 1 up")
        for rate in self.rates:
            if not (math.isfinite(rate) and rate > 0):
                raise BatchNormError(f"{rate} is not a learning rate", do="give numbers above 0")
        for option, values in (("rates", self.rates), ("depths", self.depths)):
            if not values or sorted(set(values)) != list(values):
                given = ", ".join(map(str, values)) or "empty"
                example = "0.003,0.01,0.03" if option == "rates" else "2,6,10"
                raise BatchNormError(f"--{option} is {given}", do=f"give rising numbers, as {example}")
        if self.depths[0] < 1:
            raise BatchNormError(f"--depths begins with {self.depths[0]}", do="give numbers of blocks from 1 up")
        if self.size == MEDIUM and any(depth % STAGES for depth in self.depths):
            given = ", ".join(map(str, self.depths))
            raise BatchNormError(f"--depths is {given}", do=f"give multiples of {STAGES}, the stages of these networks")

    @property
    def headline(self) -> int:
        """The depth in the first sentence: 10 blocks, or the nearest to it."""
        return min(self.depths, key=lambda depth: abs(depth - HEADLINE))

    @property
    def images(self) -> str:
        """What the networks read."""
        return "the digits" if self.size == SMALL else "Fashion-MNIST's held-out images"

    @property
    def swept(self) -> tuple[Arm, ...]:
        """The arms beside BN that choose a rate of their own; the convolutional networks have no sigmoids."""
        return tuple(arm for arm in SWEPT if self.size == SMALL or arm.activation == "relu")


def settings_for(size: str, **given: Any) -> DepthSettings:
    """Return the settings of a size, with those that are given in place of its own.

    >>> settings_for("medium", seeds=5).momentum, settings_for("medium").depths
    (0.9, (3, 6, 9))
    >>> settings_for("large")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --size is 'large'; choose one of small, medium
    """
    if size not in SIZES:
        raise BatchNormError(f"--size is {size!r}", do=f"choose one of {', '.join(SIZES)}")
    return DepthSettings(**{**SIZES[size], **given})


def parse_depths(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of numbers of blocks.

    >>> parse_depths("2, 6")
    (2, 6)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BatchNormError(f"--depths is {text!r}", do="give rising numbers, as 2,6,10") from None
