"""Time several ways to run a model in turn, and report which is fastest beyond noise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from batchnorm.preserve import random_states
from batchnorm.records import Measurement, Report
from batchnorm.transforms.stages import stage

WAS = "as it was"
_COSTLY, _WORTH = ("channels_last", "contiguous", "compiled"), 1.02  # what is not worth it for a gain below this
_MOST = 51  # runs of each way, however quick they are
_CHANCE = 0.02  # how probable it may be that a way that is no faster looks as if it were
clock = time.perf_counter  # a name of its own, so that a test can have another


@dataclass(frozen=True)
class Acceleration(Report):
    """A report with the measured times of a step or an inference: the model as it was, and each way that was tried.

    >>> seconds = {"as it was": 3.0, "fused": 2.0}
    >>> was, now = (Measurement("time", {"contender": n}, (t,) * 3, "s") for n, t in seconds.items())
    >>> print(Acceleration(times=(was, now), chosen="fused"))
    no modules changed
    a training step: 3 s as it was, 2 s now (fused: 1.50 times as fast, 1.50 to 1.50 in the middle half of 3 pairs)
    """

    times: tuple[Measurement, ...] = ()
    chosen: str = ""
    timed: str = "a training step"

    @property
    def speedups(self) -> Measurement:
        """The ratio of every pair of steps, taken in turn: the model as it was to the one returned.

        >>> was, now = (Measurement("time", {"contender": n}, (t,), "s") for n, t in (("as it was", 3.0), ("x", 2.0)))
        >>> Acceleration(times=(was, now), chosen="x").speedups.samples
        (1.5,)
        """
        by_name = {str(m.setting["contender"]): m.samples for m in self.times}
        old, new = by_name[WAS], by_name[self.chosen]
        return Measurement("speed-up", {"contender": self.chosen}, tuple(a / b for a, b in zip(old, new, strict=True)))

    @property
    def speedup(self) -> float:
        """The median of `speedups`.

        >>> was, now = (Measurement("time", {"contender": n}, (t,), "s") for n, t in (("as it was", 3.0), ("x", 2.0)))
        >>> Acceleration(times=(was, now), chosen="x").speedup
        1.5
        """
        return self.speedups.median

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.times and self.chosen == WAS:
            lines.append(
                f"{self.timed} takes {self.times[0].median:.3g} s, and nothing that was tried is reliably faster"
            )
            for ratios in (replace(self, chosen=str(m.setting["contender"])).speedups for m in self.times[1:]):
                lines.append(f"  {_in_words(ratios)}")
        elif self.times:
            ratios = self.speedups
            times = {str(m.setting["contender"]): m.median for m in self.times}
            lines.append(
                f"{self.timed}: {times[WAS]:.3g} s as it was, {times[self.chosen]:.3g} s now ({_in_words(ratios)})"
            )
        return "\n".join(lines)


def _in_words(ratios: Measurement) -> str:
    return (
        f"{ratios.setting['contender']}: {ratios.median:.2f} times as fast, {ratios.quantile(0.25):.2f} to "
        f"{ratios.quantile(0.75):.2f} in the middle half of {len(ratios.samples)} pairs"
    )


def fastest(times: tuple[Measurement, ...]) -> str:
    """Return the name of the way that is fastest beyond doubt; that of the first, the model as it was, if none is.

    >>> def times(fused):
    ...     named = {"as it was": (2.0,) * 9, "fused": fused}
    ...     return tuple(Measurement("time", {"contender": name}, found, "s") for name, found in named.items())
    >>> fastest(times((1.0,) * 9)), fastest(times((0.5,) * 6 + (2.1,) * 3))
    ('fused', 'as it was')
    """
    names = [str(m.setting["contender"]) for m in times]
    gains: dict[str, float] = {}
    for name in names[1:]:
        ratios = Acceleration(times=times, chosen=name).speedups
        wins, steps = sum(ratio > 1 for ratio in ratios.samples), len(ratios.samples)
        by_chance = sum(math.comb(steps, k) for k in range(wins, steps + 1)) / 2**steps
        if ratios.quantile(0.25) > 1 and by_chance * (len(names) - 1) <= _CHANCE:
            gains[name] = ratios.median / (_WORTH if any(word in name for word in _COSTLY) else 1.0)
    return max(gains, key=gains.__getitem__) if gains else names[0]


def measure(
    contenders: dict[str, Callable[[], None]], steps: int, warm_up: int = 2, seconds: float = 0.0
) -> tuple[Measurement, ...]:
    """Time some functions in turn, so that whatever else the machine does meets all of them.

    Each runs ``steps`` times, and more while ``seconds`` are not over, up to `_MOST`.

    >>> [m.setting["contender"] for m in measure({"a": lambda: None, "b": lambda: None}, steps=2)]
    ['a', 'b']
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with random_states():
        begun = clock()
        for index in range(warm_up + max(steps, _MOST)):
            if index >= warm_up + steps and clock() - begun > seconds:
                break
            stage(f"measuring, run {index + 1} of each of {len(contenders)} ways")
            # In turns, so that no one always runs after the same other, in what that one left in the caches.
            first = index % len(contenders)
            for name in [*contenders][first:] + [*contenders][:first]:
                began = clock()
                contenders[name]()
                if index >= warm_up:
                    samples[name].append(clock() - began)
    return tuple(Measurement("time", {"contender": name}, tuple(found), "s") for name, found in samples.items())
