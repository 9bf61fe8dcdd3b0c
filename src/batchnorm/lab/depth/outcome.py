"""What a race of residual networks measured, and the rule by which it chose learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchnorm.lab.curves import Curve, best_accuracy
from batchnorm.lab.depth.arms import NORMALISED, PLAIN, SOONEST, DepthSettings
from batchnorm.lab.summary import TRAINED, Steps, at_rate, rates_in, steps_of, typical_best


@dataclass(frozen=True)
class DepthEntry:
    """One arm at one depth: the curves from which its rate was chosen, and those of fresh seeds at that rate.

    Both are as measured, without smoothing.
    """

    blocks: int
    arm: str
    rate: float
    tuning: tuple[Curve, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class DepthOutcome:
    """All that a race measured."""

    settings: DepthSettings
    entries: tuple[DepthEntry, ...]
    classes: int
    validation_examples: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0
    interrupted: bool = False

    @property
    def networks(self) -> int:
        """How many networks were trained."""
        return sum(len(entry.tuning) + len(entry.curves) for entry in self.entries)

    def at(self, blocks: int) -> dict[str, DepthEntry]:
        """The entries of one depth by the names of their arms."""
        return {entry.arm: entry for entry in self.entries if entry.blocks == blocks}

    def arms(self, blocks: int) -> dict[str, DepthEntry]:
        """The entries of one depth without those of the plain network that only searched for the soonest rate."""
        searched = {arm.name for arm in SOONEST.values()}
        return {name: entry for name, entry in self.at(blocks).items() if name not in searched}


@dataclass(frozen=True)
class Depth:
    """One depth in figures: the plain network's best, and every arm's steps to it; ``target`` None if it did not train.

    ``fastest`` is the arm with BN that the tuning seeds chose: soonest at the plain network's best on those seeds.
    """

    blocks: int
    plain_best: float
    target: float | None
    steps: dict[str, Steps]
    to_share: dict[str, Steps]
    accuracy: dict[str, float]
    diverged: dict[str, int]
    rates: dict[str, float]
    fastest: str | None

    @property
    def ratio(self) -> float | None:
        """How many times fewer steps the chosen arm with BN needs; None if there is none to quote."""
        return None if self.fastest is None or self.fastest not in self.steps else self.steps[self.fastest].ratio


def smoothed(curve: Curve, window: int) -> Curve:
    """Average each accuracy with those before it, ``window`` in all; where the network has diverged it is 0.

    >>> from batchnorm.lab.curves import Member
    >>> smoothed(Curve(Member(0.1, 0), (10, 20, 30), (0.0, 0.5, 1.0), (1.0, 1.0, 1.0)), window=2).accuracy
    (0.0, 0.25, 0.75)
    """
    values = [0.0 if math.isnan(value) else value for value in curve.accuracy]
    means = (statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1))
    return replace(curve, accuracy=tuple(means))


def choose_rate(tuning: Sequence[Curve], settings: DepthSettings) -> float:
    """Choose the rate with the highest median of best accuracies, of those at which no tuning seed diverges.

    >>> from batchnorm.lab.curves import Member
    >>> lucky = [Curve(Member(0.3, seed), (10,), (0.9,), (1.0,), diverged_at=None if seed else 3) for seed in (0, 1)]
    >>> steady = [Curve(Member(0.1, seed), (10,), (0.8,), (1.0,)) for seed in (0, 1)]
    >>> choose_rate(lucky + steady, DepthSettings())
    0.1

    A rate at which some seeds diverge is no rate to run a network at; a median alone would choose it now and then, and
    the plain network would lose the race on fresh seeds by bad luck. This errs on its side.
    """
    curves = [smoothed(curve, settings.smoothed_over) for curve in tuning]
    rates = rates_in(curves)
    stable = [rate for rate in rates if all(curve.diverged_at is None for curve in at_rate(curves, rate))]
    return max(stable or rates, key=lambda rate: typical_best(at_rate(curves, rate)))


def soonest_rate(tuning: Sequence[Curve], target: float, settings: DepthSettings) -> float:
    """Choose the rate that reaches the target in the fewest steps; of equal ones the most accurate.

    >>> from batchnorm.lab.curves import Member
    >>> slow = Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1.0, 1.0))
    >>> fast = Curve(Member(0.3, 0), (10, 20), (0.9, 0.9), (1.0, 1.0))
    >>> soonest_rate([slow, fast], 0.5, DepthSettings(smoothed_over=1))
    0.3
    """
    curves = [smoothed(curve, settings.smoothed_over) for curve in tuning]

    def order(rate: float) -> tuple[float, float]:
        own = at_rate(curves, rate)
        return steps_of(own, target).median, -typical_best(own)

    return min(rates_in(curves), key=order)


def trains(tuning: Sequence[Curve], settings: DepthSettings, classes: int) -> bool:
    """Whether an arm trains on the tuning seeds at any of its rates.

    >>> trains((), DepthSettings(), classes=10)
    False
    """
    curves = [smoothed(curve, settings.smoothed_over) for curve in tuning]
    return any(typical_best(at_rate(curves, rate)) >= TRAINED / classes for rate in rates_in(curves))


def choose_arm(entries: dict[str, DepthEntry], settings: DepthSettings) -> str | None:
    """Choose the arm with BN that is soonest, on the tuning seeds, at the plain network's best on those seeds.

    >>> choose_arm({}, DepthSettings()) is None
    True
    """
    if PLAIN.name not in entries:
        return None
    window, plain = settings.smoothed_over, entries[PLAIN.name]
    own = [smoothed(curve, window) for curve in at_rate(plain.tuning, plain.rate)]
    target = typical_best(own)
    soonest: dict[str, float] = {}
    for arm in NORMALISED:
        if arm.name in entries and entries[arm.name].tuning:
            curves = [smoothed(curve, window) for curve in entries[arm.name].tuning]
            soonest[arm.name] = steps_of(curves, target).median
    return min(soonest, key=lambda name: soonest[name], default=None)


def depth_of(outcome: DepthOutcome, blocks: int) -> Depth | None:
    """Turn the curves of one depth into figures; None if the plain network was not run there.

    >>> depth_of(DepthOutcome(DepthSettings(), (), 10, 450), blocks=10) is None
    True

    The target is the best accuracy that most of the plain network's fresh seeds reach (the lower of two medians).
    """
    entries, window = outcome.at(blocks), outcome.settings.smoothed_over
    if PLAIN.name not in entries:
        return None
    curves = {name: [smoothed(curve, window) for curve in entry.curves] for name, entry in entries.items()}
    best = statistics.median_low([best_accuracy(curve) for curve in curves[PLAIN.name]])
    shown = {name: curves[name] for name in outcome.arms(blocks)}
    accuracy = {name: statistics.median(map(best_accuracy, own)) for name, own in shown.items()}
    diverged = {name: sum(c.diverged_at is not None for c in own) for name, own in shown.items()}
    rates = {name: entries[name].rate for name in shown}
    if best < TRAINED / outcome.classes:
        return Depth(blocks, best, None, {}, {}, accuracy, diverged, rates, None)
    steps, to_share = (steps_to_target(curves, share * best, arm.name) for share, arm in SOONEST.items())
    return Depth(blocks, best, best, steps, to_share, accuracy, diverged, rates, choose_arm(entries, outcome.settings))


def steps_to_target(curves: Mapping[str, Sequence[Curve]], target: float, searched: str) -> dict[str, Steps]:
    """Return every arm's steps to a target, with its ratio to the plain network's.

    The plain network's are those at the rate that was ``searched`` for this target, if that was run and is sooner.
    """
    plain = curves[PLAIN.name]
    if searched in curves and steps_of(curves[searched], target).median < steps_of(plain, target).median:
        plain = curves[searched]
    arms = {name: own for name, own in curves.items() if name not in {arm.name for arm in SOONEST.values()}}
    baseline = steps_of(plain, target).median
    return {name: steps_of(own, target, baseline) for name, own in {**arms, PLAIN.name: plain}.items()}


def depths_of(outcome: DepthOutcome) -> list[Depth]:
    """Return every depth that was run, rising.

    >>> depths_of(DepthOutcome(DepthSettings(), (), 10, 450))
    []
    """
    found = (depth_of(outcome, blocks) for blocks in outcome.settings.depths)
    return [depth for depth in found if depth is not None]
