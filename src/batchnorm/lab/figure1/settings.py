"""The settings of Figure 1. The paper gives the network, the batch and the steps; not the rate, nor the start."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchnorm.errors import BatchNormError
from batchnorm.lab.networks.schemes import SCHEMES

PLAIN, WITH = "without BN", "with BN"
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
INITS = ("small-gaussian", "xavier")
PAPER_STEPS, BUNDLED_STEPS = 50_000, 3_000
TUNING_STEPS = 10_000  # at most: rates are chosen after these
RECORDS = 100  # over a run, unless --every says otherwise
SHARES = (0.15, 0.5, 0.85)


@dataclass(frozen=True)
class Figure1Settings:
    """The settings of Figure 1; ``steps`` and ``every`` follow from the data and from each other if they are None.

    >>> Figure1Settings().given_data(bundled=True).steps, Figure1Settings().given_data(bundled=False).every
    (3000, 500)
    >>> Figure1Settings(seeds=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --seeds is 0; give a whole number from 1 up
    """

    seeds: int = 5
    steps: int | None = None
    batch_size: int = 60
    every: int | None = None
    rates: tuple[float, ...] = RATES
    inits: tuple[str, ...] = INITS
    width: int = 100
    layers: int = 3
    smoothed_over: int = 5  # validations

    def __post_init__(self) -> None:
        """Raise for settings that cannot be run."""
        for name in ("seeds", "steps", "batch_size", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BatchNormError(f"--{name.replace('_', '-')} is {value}", do="give a whole number from 1 up")
        for rate in self.rates:
            if not (math.isfinite(rate) and rate > 0):
                raise BatchNormError(f"{rate} is not a learning rate", do="give numbers above 0")
        if not self.rates or sorted(set(self.rates)) != list(self.rates):
            given = ", ".join(map(str, self.rates)) or "empty"
            raise BatchNormError(f"--rates is {given}", do="give rising numbers, as 0.3,1,3")
        for init in self.inits:
            if init not in SCHEMES:
                raise BatchNormError(f"--init is {init!r}", do=f"choose from {', '.join(SCHEMES)}")
        if not self.inits or len(set(self.inits)) < len(self.inits):
            raise BatchNormError("--init names one start twice, or none", do="give one or more, as small-gaussian")

    def given_data(self, *, bundled: bool) -> Figure1Settings:
        """Fill in the steps: the paper's 50,000 where data are given, fewer on the bundled digits."""
        steps = self.steps or (BUNDLED_STEPS if bundled else PAPER_STEPS)
        return replace(self, steps=steps, every=self.every or max(1, steps // RECORDS))

    @property
    def amounts(self) -> tuple[int, int]:
        """The steps and how many are between two validations, once they are known."""
        assert self.steps is not None
        assert self.every is not None
        return self.steps, self.every


def parse_inits(text: str) -> tuple[str, ...]:
    """Read a comma-separated list of starts.

    >>> parse_inits("small-gaussian, xavier")
    ('small-gaussian', 'xavier')
    """
    return tuple(part.strip() for part in text.split(","))
