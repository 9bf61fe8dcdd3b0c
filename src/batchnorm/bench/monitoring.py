"""What it costs to be looked at: training steps with `batchnorm.monitor` or `watch` beside plain ones, alternating."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from batchnorm.bench.measure import collector_off
from batchnorm.bench.resnet import resnet18
from batchnorm.doctor.monitor import monitor
from batchnorm.doctor.run import MonitoredRun
from batchnorm.observe.run import Watch
from batchnorm.observe.watch import watch
from batchnorm.records import Measurement

EVERY = 50
WARMUPS = 3
GOAL = 0.03
WATCH_GOAL = 0.05


@dataclass(frozen=True)
class Cost:
    """The samples, in seconds a step: plain ones, monitored ones, and pairs in which the numbers were looked at.

    >>> cost = Cost((1.0, 1.0), (1.01, 1.01), (1.0,), (1.5,), every=50)
    >>> [round(share, 4) for share in (cost.between, cost.looking, cost.share)]
    [0.01, 0.5, 0.0198]
    """

    plain: tuple[float, ...]
    monitored: tuple[float, ...]
    plain_beside: tuple[float, ...]
    looked_at: tuple[float, ...]
    every: int
    word: str = "monitored"
    goal: float = GOAL

    @property
    def between(self) -> float:
        """What a step costs more in which only shapes and flags are seen: the median over neighbours."""
        return _more(self.monitored, self.plain)

    @property
    def looking(self) -> float:
        """What a step costs more in which the numbers are read, too."""
        return _more(self.looked_at, self.plain_beside)

    @property
    def share(self) -> float:
        """What all steps cost more on average, one in ``every`` being looked at."""
        return (self.between * (self.every - 1) + self.looking) / self.every

    def quartiles(self) -> tuple[float, float]:
        """The quarter and three quarters of the ratios between neighbours, less one.

        >>> Cost((1.0, 1.0, 1.0), (1.0, 1.1, 1.2), (), (), 50).quartiles()[0] < 0.06
        True
        """
        ratios = Measurement("ratio", {}, _ratios(self.monitored, self.plain))
        return ratios.quantile(0.25) - 1, ratios.quantile(0.75) - 1

    def measurements(self, setting: dict[str, object]) -> tuple[Measurement, ...]:
        """All samples as records."""
        kinds = {
            "plain": self.plain, self.word: self.monitored, "plain beside looking": self.plain_beside,
            "looked at": self.looked_at,
        }  # fmt: skip
        return tuple(Measurement("step time", {**setting, "step": kind}, times, "s") for kind, times in kinds.items())


def _ratios(slower: tuple[float, ...], faster: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(slower, faster, strict=True) if b > 0)


def _more(slower: tuple[float, ...], faster: tuple[float, ...]) -> float:
    ratios = _ratios(slower, faster)
    return statistics.median(ratios) - 1 if ratios else 0.0


class Observer(Protocol):
    """An observer of training, as this measurement drives it."""

    def aim(self, step: int) -> None:
        """Let this be the number of the next step."""

    def set_labels(self, labels: torch.Tensor) -> None:
        """Take the labels, as a training loop gives them in every step."""


class _Monitor:
    def __init__(self, run: MonitoredRun) -> None:
        self.run = run

    def aim(self, step: int) -> None:
        self.run.step = step

    def set_labels(self, labels: torch.Tensor) -> None:
        self.run.set_labels(labels)


class _Watch:
    def __init__(self, seen: Watch) -> None:
        self.seen = seen

    def aim(self, step: int) -> None:
        self.seen.go_to(step)

    def set_labels(self, labels: torch.Tensor) -> None:
        self.seen.log("training loss", labels[0])


@contextmanager
def monitored(model: nn.Module, optimizer: Optimizer) -> Iterator[Observer]:
    """Run all rules, with labels; findings in random data are not printed."""
    with monitor(model, optimizer, every=EVERY, warn=False) as run:
        yield _Monitor(run)


@contextmanager
def watched(model: nn.Module, optimizer: Optimizer) -> Iterator[Observer]:
    """All quantities of all layers go to a file, and the loss of every step."""
    with (
        tempfile.TemporaryDirectory() as folder,
        watch(model, optimizer, every=EVERY, to=Path(folder, "watch.jsonl")) as seen,
    ):
        yield _Watch(seen)


def measure_watch(rounds: int, **options: Any) -> Cost:
    """Time what `batchnorm.watch` adds to a training step, as `measure_monitor` does.

    >>> cost = measure_watch(100)  # doctest: +SKIP
    """
    return measure_monitor(rounds, observe=watched, word="watched", goal=WATCH_GOAL, **options)


def measure_monitor(
    rounds: int,
    *,
    make: Callable[[], nn.Module] = resnet18,
    batch: tuple[int, ...] = (32, 3, 32, 32),
    looks: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    observe: Callable[[nn.Module, Optimizer], AbstractContextManager[Observer]] = monitored,
    word: str = "monitored",
    goal: float = GOAL,
) -> Cost:
    """Time pairs of training steps, one plain and one observed, of two equal networks; who begins alternates.

    >>> small = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> cost = measure_monitor(2, make=small, batch=(4, 3, 2, 2), looks=1)
    >>> len(cost.plain), len(cost.monitored), len(cost.looked_at)
    (2, 2, 1)

    ``looks`` pairs more (by default a quarter as many) are those in which the numbers are read, as in every
    ``EVERY``-th step of a run.
    """
    torch.manual_seed(0)
    plain, other = _Trained(make()), _Trained(make())
    x, y = torch.randn(batch), torch.randint(0, 2, batch[:1])
    looks = max(1, rounds // 4) if looks is None else looks
    pairs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with collector_off(), observe(other.model, other.optimizer) as observer:
        for step in range(WARMUPS + rounds + looks):
            look = step >= WARMUPS + rounds
            observer.aim(EVERY * (step + 1) + (0 if look else 1 + step % (EVERY - 1)))
            times = {}
            for one in (plain, other) if step % 2 else (other, plain):
                start = clock()
                if one is other:
                    observer.set_labels(y)
                one.step(x, y)
                times[one] = clock() - start
            if step >= WARMUPS:
                pairs[look].append((times[plain], times[other]))
    (plains, observed), (beside, looked) = (_columns(pairs[look]) for look in (False, True))
    return Cost(plains, observed, beside, looked, EVERY, word, goal)


def _columns(pairs: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


class _Trained:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def describe(cost: Cost, threads: int) -> str:
    """Say what was measured, in a few lines.

    >>> print(describe(Cost((0.1, 0.1), (0.101, 0.101), (0.1,), (0.11,), 50), 2))
    a training step of a ResNet-18 (torch.nn layers, 32 images of 32x32, 2 threads): 100 ms
    monitored: +1.0 % (quartiles +1.0 % to +1.0 %) in 2 alternating pairs of steps
    in every 50th step, with the numbers: +10.0 % in 1 pairs
    together: +1.2 % (goal: at most 3 %)
    """
    low, high = cost.quartiles()
    step = statistics.median(cost.plain) * 1000 if cost.plain else float("nan")
    return "\n".join([
        f"a training step of a ResNet-18 (torch.nn layers, 32 images of 32x32, {threads} threads): {step:.0f} ms",
        f"{cost.word}: {_percent(cost.between)} (quartiles {_percent(low)} to {_percent(high)}) in {len(cost.plain)} "
        "alternating pairs of steps",
        f"in every {cost.every}th step, with the numbers: {_percent(cost.looking)} in {len(cost.looked_at)} pairs",
        f"together: {_percent(cost.share)} (goal: at most {cost.goal * 100:.0f} %)",
    ])  # fmt: skip


def _percent(share: float) -> str:
    return f"{share * 100:+.1f} %"
