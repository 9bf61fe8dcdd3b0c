"""Equal chances for every arm: the same grid of rates, its own best one by tuning seeds, then fresh seeds at that rate.

The accuracy of a network is the best mean of `SMOOTHED` validations in a row. The rate of an arm is the one with the
highest median of it over the tuning seeds, of those at which no tuning seed diverges. Fresh seeds are then trained at
that rate. Every rate's tuning accuracies are kept, so that arms are also compared at equal rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import nn

from batchnorm.lab.curves import Curve, Member, best_accuracy
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.depth.outcome import smoothed
from batchnorm.lab.ensemble import Copies, Stack
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train

TUNING_SEEDS = (101, 102, 103)
SMOOTHED = 5
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Terms:
    """What all arms of a contest have alike."""

    rates: tuple[float, ...]
    steps: int
    seeds: int = 5  # fresh ones
    batch_size: int = 32
    every: int = 10
    momentum: float = 0.0
    schedule: str = "constant"
    clip: float | None = None
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS


def contest(
    build: Callable[[int], Network],
    data: Examples,
    terms: Terms,
    recorder: Recorder,
    *,
    tuning: Examples | None = None,
    stack: Callable[[Sequence[Network]], Stack] = Copies,
    at_once: int = 30,
) -> dict[str, Any]:
    """Run one arm: sweep its rates on tuning seeds, choose, train fresh seeds. The result is JSON-able.

    >>> terms = Terms((0.1, 0.3), steps=500)
    >>> found = contest(lambda seed: Residual(seed, blocks=2), data, terms, recorder)  # doctest: +SKIP
    >>> found["rate"], found["accuracies"]  # doctest: +SKIP
    (0.3, [0.98, 0.97, 0.98, 0.98, 0.98])

    ``data`` is what fresh seeds are trained and validated on; ``tuning``, if given, is what the rate is chosen on.
    ``at_once`` is how many copies are trained side by side.
    """
    saved = recorder.restored()
    total = terms.steps * (len(terms.rates) * len(terms.tuning_seeds) + terms.seeds)

    def trained(members: Sequence[Member], on: Examples, done: int, words: str) -> list[Curve]:
        curves: list[Curve] = []
        for start in range(0, len(members), at_once):
            own = members[start : start + at_once]

            def look(progress: Progress, before: int = done + start * terms.steps, count: int = len(own)) -> None:
                recorder.progress(before + progress.step * count, total, words)

            amounts = {"steps": terms.steps, "batch_size": terms.batch_size, "every": terms.every}
            curves += train(stack([build(member.seed) for member in own]), own, on, watch=look, **amounts)
        return curves

    def members_of(rates: Sequence[float], seeds: Sequence[int]) -> list[Member]:
        return [Member(rate, seed, terms.momentum, terms.schedule, terms.clip) for seed in seeds for rate in rates]

    if saved is None:
        curves = trained(members_of(terms.rates, terms.tuning_seeds), tuning or data, 0, "choosing a rate")
        sweep = swept(curves, terms.rates)
        recorder.save(1, {}, sweep=sweep)
    else:
        sweep = saved.facts["sweep"]
    rate = chosen(sweep)
    before = total - terms.steps * terms.seeds
    fresh = trained(members_of([rate], range(terms.seeds)), data, before, f"fresh seeds at rate {rate:g}")
    return {
        "rate": rate,
        "sweep": sweep,
        "accuracies": [accuracy(curve) for curve in fresh],
        "curves": [asdict(curve) for curve in fresh],
    }


def swept(curves: Sequence[Curve], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Return for each rate the accuracies of its seeds, and how many of them diverged."""
    rows = []
    for rate in rates:
        own = [curve for curve in curves if curve.member.learning_rate == rate]
        diverged = sum(curve.diverged_at is not None for curve in own)
        rows.append({"rate": rate, "accuracies": [accuracy(curve) for curve in own], "diverged": diverged})
    return rows


def accuracy(curve: Curve) -> float:
    """Return the best mean of `SMOOTHED` validations in a row.

    >>> accuracy(Curve(Member(0.1, 0), (10, 20, 30, 40, 50), (0.1, 0.2, 0.3, 0.4, 0.5), (1.0,) * 5))
    0.3
    """
    return best_accuracy(smoothed(curve, SMOOTHED))


def chosen(sweep: Sequence[Mapping[str, Any]]) -> float:
    """Return the rate with the highest median accuracy, of those at which no seed diverged if there are any.

    >>> chosen([{"rate": 0.1, "accuracies": [0.5], "diverged": 0}, {"rate": 1.0, "accuracies": [0.9], "diverged": 1}])
    0.1
    """
    stable = [row for row in sweep if not row["diverged"]]
    return float(max(stable or sweep, key=lambda row: statistics.median(row["accuracies"]))["rate"])


def working_range(sweep: Sequence[Mapping[str, Any]], share: float = 0.9) -> list[float]:
    """Return the rates that work: the median accuracy is at least ``share`` of the best one, and no seed diverges.

    >>> working_range([{"rate": r, "accuracies": [a], "diverged": 0} for r, a in ((0.1, 0.9), (1.0, 0.5))])
    [0.1]
    """
    best = max(statistics.median(row["accuracies"]) for row in sweep)
    return [
        row["rate"] for row in sweep if not row["diverged"] and statistics.median(row["accuracies"]) >= share * best
    ]
