"""Statistics of claims: medians with bootstrap intervals, and the one rule that makes verdicts of them.

A claim says that a quantity lies above (or below) a threshold. It is confirmed if the whole 95% interval does,
refuted if the whole interval lies on the other side, and inconclusive otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from batchnorm.errors import BatchNormError
from batchnorm.lab.verdict import CONFIRMED, FEWEST_SEEDS, INCONCLUSIVE, REFUTED, together

LEVEL = 0.95
RESAMPLES = 2000
SEED = 2015
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A quantity with its interval, and the threshold on whose side the claim says it lies.

    >>> Estimate("steps, without / with", 8.0, 6.0, 9.0, threshold=2.0).outcome
    'confirmed'
    >>> Estimate("lost accuracy", 0.2, 0.1, 0.3, threshold=0.05, above=False).outcome
    'refuted'
    """

    what: str
    value: float
    low: float
    high: float
    threshold: float
    above: bool = True  # whether the claim says that it lies above the threshold
    unit: str = ""  # "x", "%" (the value is a share) or nothing

    @property
    def outcome(self) -> str:
        """Return confirmed, refuted or inconclusive; a number that is NaN is no evidence."""
        if math.isnan(self.low) or math.isnan(self.high):
            return INCONCLUSIVE
        if self.low > self.threshold:
            return CONFIRMED if self.above else REFUTED
        if self.high < self.threshold:
            return REFUTED if self.above else CONFIRMED
        return INCONCLUSIVE

    @property
    def figure(self) -> str:
        """Return the value with its interval, in words."""
        value, low, high = (written(number, self.unit) for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})" if low != high else value

    @property
    def claimed(self) -> str:
        """Return the side of the threshold on which the claim says it lies."""
        return f"{'above' if self.above else 'below'} {written(self.threshold, self.unit)}"

    def __str__(self) -> str:
        return f"{self.what}: {self.figure}, claimed {self.claimed}"


def written(value: float, unit: str = "") -> str:
    """Write a figure with three digits and its unit.

    >>> written(11.8374, "x"), written(0.987, "%"), written(float("inf"), "x")
    ('11.8x', '98.7%', 'infinite')
    """
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if math.isnan(value):
        return "unknown"
    if unit == "%":
        return f"{100 * value:.1f}%"
    return f"{value:.3g}{unit}"


def verdict_of(estimates: Sequence[Estimate]) -> str:
    """Judge several estimates together: confirmed if all are, refuted if one is.

    >>> verdict_of([Estimate("a", 2, 1.5, 3, threshold=1), Estimate("b", 1, 0.5, 3, threshold=1)])
    'inconclusive'
    """
    return together([estimate.outcome for estimate in estimates])


def number(value: float | None, missing: float = math.nan) -> float:
    """Return a number of a result; null, which NaN and infinity become in a file, is ``missing``.

    >>> number(None), number(None, math.inf), number(2)
    (nan, inf, 2.0)
    """
    return missing if value is None else float(value)


def exact(what: str, value: float | None, threshold: float, *, above: bool = True, unit: str = "") -> Estimate:
    """Return the estimate of a quantity that has no spread: arithmetic, or one deterministic computation.

    >>> exact("largest error", 1e-14, 1e-10, above=False).outcome
    'confirmed'
    """
    found = number(value)
    return Estimate(what, found, found, found, threshold, above, unit)


def median(what: str, values: Sequence[float], threshold: float, *, above: bool = True, unit: str = "") -> Estimate:
    """Estimate the median over seeds.

    >>> median("accuracy", [0.91, 0.93, 0.92, 0.94, 0.9], 0.5, unit="%").outcome
    'confirmed'
    """
    return _resampled(what, [values], lambda a: _median(a), threshold, above, unit, paired=False)


def difference(
    what: str,
    first: Sequence[float],
    second: Sequence[float],
    threshold: float = 0.0,
    *,
    above: bool = True,
    unit: str = "",
    paired: bool = False,
) -> Estimate:
    """Estimate by how much the median of the first exceeds that of the second; ``paired`` by seed.

    >>> difference("gap", [0.9, 0.92, 0.91], [0.5, 0.55, 0.52], unit="%").outcome
    'confirmed'
    """
    if paired:
        _check_pairs(first, second)
        return median(what, [a - b for a, b in zip(first, second, strict=True)], threshold, above=above, unit=unit)
    return _resampled(what, [first, second], lambda a, b: _median(a) - _median(b), threshold, above, unit, paired=False)


def ratio(
    what: str,
    first: Sequence[float],
    second: Sequence[float],
    threshold: float = 1.0,
    *,
    above: bool = True,
    unit: str = "x",
    paired: bool = False,
) -> Estimate:
    """Estimate how many times the median of the second the median of the first is; infinite counts as never.

    >>> ratio("steps, without / with", [1300, 1400, math.inf], [130, 120, 140]).outcome
    'confirmed'
    """
    if paired:
        _check_pairs(first, second)
        values = [_divided(a, b) for a, b in zip(first, second, strict=True)]
        return median(what, values, threshold, above=above, unit=unit)
    return _resampled(
        what, [first, second], lambda a, b: _ratio(_median(a), _median(b)), threshold, above, unit, paired=False
    )


def _resampled(
    what: str,
    samples: Sequence[Sequence[float]],
    statistic: Callable[..., Floats],
    threshold: float,
    above: bool,
    unit: str,
    *,
    paired: bool,
) -> Estimate:
    """Return a statistic with the percentile interval of SciPy's bootstrap; too few seeds give no interval."""
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if any(len(array) == 0 for array in arrays) or any(np.isnan(array).any() for array in arrays):
        return Estimate(what, math.nan, math.nan, math.nan, threshold, above, unit)
    value = float(statistic(*(array[None] for array in arrays))[0])
    if min(map(len, arrays)) < FEWEST_SEEDS:
        return Estimate(what, value, math.nan, math.nan, threshold, above, unit)
    drawn = np.random.default_rng(SEED)
    with np.errstate(invalid="ignore"):
        found = stats.bootstrap(
            arrays,
            lambda *own, axis=-1: statistic(*own),
            n_resamples=RESAMPLES,
            confidence_level=LEVEL,
            method="percentile",
            vectorized=True,
            paired=paired,
            rng=drawn,
        )
        # SciPy interpolates between resamples, which infinite values do not bear: take the order statistics.
        own = np.sort(found.bootstrap_distribution)
    tail = int(len(own) * (1 - LEVEL) / 2)
    return Estimate(what, value, float(own[tail]), float(own[-1 - tail]), threshold, above, unit)


def _median(values: Floats) -> Floats:
    """Return the lower median of each row, which needs no mean of two values, one of which may be infinite."""
    middle = (values.shape[-1] - 1) // 2
    found: Floats = np.sort(values, axis=-1)[..., middle]
    return found


def _ratio(first: Floats, second: Floats) -> Floats:
    """Divide; 0 / 0 and never / never are 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = first / second
    return np.where(np.isnan(quotient), 1.0, quotient)


def _divided(first: float, second: float) -> float:
    return float(_ratio(np.array([first]), np.array([second]))[0])


def _check_pairs(first: Sequence[float], second: Sequence[float]) -> None:
    if len(first) != len(second):
        raise BatchNormError(f"{len(first)} values are paired with {len(second)}", do="give one of each for every seed")
