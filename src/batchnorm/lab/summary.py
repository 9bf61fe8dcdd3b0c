"""From curves to figures: the baseline's best, the steps to it, the ratios. No torch, no drawing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from batchnorm.lab.curves import NEVER, Curve, best_accuracy, median_curve, steps_to
from batchnorm.lab.options import Options
from batchnorm.lab.variants import BASELINE

SHARE = 0.95
TRAINED = 3.0  # a baseline below this many times chance did not train


@dataclass(frozen=True)
class Lane:
    """One variant's run: the curves of all its rates and seeds, its best rate, core-seconds per network."""

    variant: str
    curves: tuple[Curve, ...]
    learning_rate: float
    seconds_per_network: float

    @property
    def chosen(self) -> tuple[Curve, ...]:
        """The curves at the best rate, one per seed."""
        return at_rate(self.curves, self.learning_rate)


@dataclass(frozen=True)
class Result:
    """All that a race measured; ``seconds`` is its wall-clock."""

    options: Options
    lanes: tuple[Lane, ...]
    validation_images: int
    classes: int
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def networks(self) -> int:
        """How many networks were trained."""
        return sum(len(lane.curves) for lane in self.lanes)


@dataclass(frozen=True)
class Steps:
    """Steps to a target, seed by seed (infinite where it was never reached), and the ratio of medians."""

    seeds: tuple[float, ...]
    ratio: float | None = None

    @property
    def median(self) -> float:
        """The middle seed; infinite unless most seeds reached the target."""
        return statistics.median(self.seeds)

    @property
    def reached(self) -> tuple[float, ...]:
        """The seeds that got there."""
        return tuple(steps for steps in self.seeds if steps != NEVER)


@dataclass(frozen=True)
class VariantRow:
    """One variant of the table; the steps are None when there is no target to reach."""

    variant: str
    learning_rate: float
    to_best: Steps | None
    to_share: Steps | None
    accuracies: tuple[float, ...]
    median_accuracy: tuple[float, ...]
    diverged: int
    seconds_per_network: float


@dataclass(frozen=True)
class Fastest:
    """The baseline's steps to a target at the learning rate of its grid that gets there soonest."""

    learning_rate: float
    steps: Steps


@dataclass(frozen=True)
class Summary:
    """The race in figures; ``target`` is None while no baseline trained."""

    result: Result
    rows: tuple[VariantRow, ...]
    target: float | None
    fastest_to_best: Fastest | None
    fastest_to_share: Fastest | None


def at_rate(curves: Sequence[Curve], rate: float) -> tuple[Curve, ...]:
    """Select the curves of one learning rate.

    >>> at_rate([], 0.1)
    ()
    """
    return tuple(curve for curve in curves if curve.member.learning_rate == rate)


def rates_in(curves: Sequence[Curve]) -> list[float]:
    """List the learning rates that occur, rising.

    >>> rates_in([])
    []
    """
    return sorted({curve.member.learning_rate for curve in curves})


def typical_best(curves: Sequence[Curve]) -> float:
    """Give the median of the seeds' best accuracies, the lower of two middle ones: most seeds reach it.

    >>> from batchnorm.lab.curves import Member
    >>> typical_best([Curve(Member(0.1, seed), (10,), (0.2 * seed,), (1.0,)) for seed in range(4)])
    0.2
    """
    return statistics.median_low(best_accuracy(curve) for curve in curves)


def best_rate(curves: Sequence[Curve], classes: int) -> float:
    """Choose the rate with the best typical accuracy; of equal ones the soonest there.

    >>> from batchnorm.lab.curves import Member
    >>> accuracy = {0.1: (0.2, 0.9), 0.2: (0.9, 0.9), 0.4: (0.1, 0.1)}
    >>> best_rate([Curve(Member(rate, 0), (10, 20), values, (1, 1)) for rate, values in accuracy.items()], 10)
    0.2

    Where no rate trained, the middle of the grid stands in: a best among equals at chance would mean nothing.
    """
    rates = rates_in(curves)
    target = max(typical_best(at_rate(curves, rate)) for rate in rates)
    if target < TRAINED / classes:
        return rates[len(rates) // 2]
    equals = [rate for rate in rates if typical_best(at_rate(curves, rate)) == target]
    return min(equals, key=lambda rate: steps_of(at_rate(curves, rate), target).median)


def steps_of(curves: Sequence[Curve], target: float, against: float | None = None) -> Steps:
    """Give each seed's steps to the target, and how many times fewer their median is than ``against``.

    >>> from batchnorm.lab.curves import Member
    >>> steps_of([Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1, 1))], 0.5, against=60).ratio
    3.0
    """
    seeds = tuple(steps_to(curve, target) for curve in curves)
    middle = statistics.median(seeds)
    return Steps(seeds, None if against is None or math.isinf(middle) else against / middle)


def fastest(curves: Sequence[Curve], target: float) -> Fastest:
    """Find the learning rate whose median reaches the target in the fewest steps.

    >>> from batchnorm.lab.curves import Member
    >>> fastest([Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1, 1))], 0.5).learning_rate
    0.1
    """
    candidates = [Fastest(rate, steps_of(at_rate(curves, rate), target)) for rate in rates_in(curves)]
    return min(candidates, key=lambda candidate: candidate.steps.median)


def summarise(result: Result) -> Summary:
    """Turn a race's curves into its table.

    >>> summarise(Result(Options(), (), 450, 10)).rows
    ()

    The ratios are against the fastest learning rate the baseline has for that very target, which for a share
    of its best may be another than its best rate: no variant is compared with a slower opponent.
    """
    baseline = next((lane for lane in result.lanes if lane.variant == BASELINE), None)
    best = typical_best(baseline.chosen) if baseline else 0.0
    if baseline is None or best < TRAINED / result.classes:
        return Summary(result, tuple(row_of(lane) for lane in result.lanes), None, None, None)
    to_best, to_share = fastest(baseline.curves, best), fastest(baseline.curves, SHARE * best)
    rows = tuple(
        row_of(
            lane,
            steps_of(lane.chosen, best, to_best.steps.median),
            steps_of(lane.chosen, SHARE * best, to_share.steps.median),
        )
        for lane in result.lanes
    )
    return Summary(result, rows, best, to_best, to_share)


def row_of(lane: Lane, to_best: Steps | None = None, to_share: Steps | None = None) -> VariantRow:
    """Make a lane's row.

    >>> row_of(Lane("Inception", (), 0.1, 2.0)).learning_rate
    0.1
    """
    return VariantRow(
        lane.variant,
        lane.learning_rate,
        to_best,
        to_share,
        tuple(best_accuracy(curve) for curve in lane.chosen),
        median_curve(lane.chosen),
        sum(curve.diverged_at is not None for curve in lane.chosen),
        lane.seconds_per_network,
    )
