"""The settings of the landscape: those of Santurkar et al. (2018) where they fit a small network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchnorm.errors import BatchNormError

PLAIN, WITH, SCALED = "without BN", "with BN", "with BN, weights x3"
SCALE = 3.0
FACTORS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
BUNDLED_STEPS, DATA_STEPS = 400, 2000


@dataclass(frozen=True)
class LandscapeSettings:
    """The settings of the landscape; ``steps`` follows from the data if it is None.

    >>> LandscapeSettings(rate=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --rate is 0; give a number above 0
    """

    seeds: int = 5
    steps: int | None = None
    batch_size: int = 128
    records: int = 40
    rate: float = 0.1
    layers: int = 8
    width: int = 64
    factors: tuple[float, ...] = FACTORS

    def __post_init__(self) -> None:
        """Raise for settings that cannot be run."""
        for name in ("seeds", "steps", "batch_size", "records", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BatchNormError(f"--{name.replace('_', '-')} is {value}", do="give a whole number from 1 up")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise BatchNormError(f"--rate is {self.rate:g}", do="give a number above 0")

    def given_data(self, *, bundled: bool) -> LandscapeSettings:
        """Fill in the steps: fewer on the bundled digits.

        >>> LandscapeSettings().given_data(bundled=True).steps
        400
        """
        return replace(self, steps=self.steps or (BUNDLED_STEPS if bundled else DATA_STEPS))

    @property
    def recorded(self) -> tuple[int, ...]:
        """The steps before which the landscape is measured, evenly on a logarithmic scale; the first is step 1.

        >>> LandscapeSettings(steps=100, records=5).recorded
        (1, 3, 10, 32, 100)
        """
        last = math.log(self.steps or 1)
        parts = max(self.records - 1, 1)
        return tuple(sorted({round(math.exp(last * number / parts)) for number in range(self.records)}))
