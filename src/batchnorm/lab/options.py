"""What can be asked of the race, checked before anything slow begins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchnorm.errors import BatchNormError
from batchnorm.lab.networks.schemes import SCHEMES

INITS = tuple(SCHEMES)
RATES = (0.05, 0.1, 0.2, 0.4)
SIGMOID_RATES = (0.3, 3.0)


@dataclass(frozen=True)
class Options:
    """The settings of a race.

    >>> Options(init="he").steps
    800
    >>> Options(seeds=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --seeds is 0; give a whole number from 1 up

    ``sigmoid_rates`` are wider apart and reach higher than ``rates`` because they only have to show whether
    the network learns at all, and a sigmoid's small slope asks for larger steps.
    """

    init: str = "xavier"
    seeds: int = 3
    steps: int = 800
    batch_size: int = 32
    every: int = 20
    rates: tuple[float, ...] = RATES
    sigmoid_rates: tuple[float, ...] = SIGMOID_RATES

    def __post_init__(self) -> None:
        """Raise for settings that cannot be run."""
        if self.init not in INITS:
            raise BatchNormError(f"--init is {self.init!r}", do=f"choose one of {', '.join(INITS)}")
        for name in ("seeds", "steps", "batch_size", "every"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise BatchNormError(f"--{flag} is {getattr(self, name)}", do="give a whole number from 1 up")
        for rate in (*self.rates, *self.sigmoid_rates):
            if not (math.isfinite(rate) and rate > 0):
                raise BatchNormError(f"{rate} is not a learning rate", do="give numbers above 0")
        if not self.rates or sorted(set(self.rates)) != list(self.rates):
            raise BatchNormError(
                f"--rates is {', '.join(map(str, self.rates)) or 'empty'}",
                do="give rising numbers, as 0.05,0.1,0.2",
            )


def parse_rates(text: str) -> tuple[float, ...]:
    """Read a comma-separated list of learning rates.

    >>> parse_rates("0.05, 0.1")
    (0.05, 0.1)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BatchNormError(f"--rates is {text!r}", do="give rising numbers, as 0.05,0.1,0.2") from None
