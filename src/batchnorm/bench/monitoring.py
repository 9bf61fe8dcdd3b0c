"""What it costs to be looked at: training steps with `batchnorm.monitor` beside plain ones, alternating."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from batchnorm.bench.measure import collector_off
from batchnorm.bench.resnet import resnet18
from batchnorm.doctor.monitor import monitor
from batchnorm.records import Measurement

EVERY = 50
WARMUPS = 3
GOAL = 0.03


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
            "plain": self.plain, "monitored": self.monitored, "plain beside looking": self.plain_beside,
            "looked at": self.looked_at,
        }  # fmt: skip
        return tuple(Measurement("step time", {**setting, "step": kind}, times, "s") for kind, times in kinds.items())


def _ratios(slower: tuple[float, ...], faster: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(slower, faster, strict=True) if b > 0)


def _more(slower: tuple[float, ...], faster: tuple[float, ...]) -> float:
    ratios = _ratios(slower, faster)
    return statistics.median(ratios) - 1 if ratios else 0.0


def measure_monitor(
    rounds: int,
    *,
    make: Callable[[], nn.Module] = resnet18,
    batch: tuple[int, ...] = (32, 3, 32, 32),
    looks: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Time pairs of training steps, one plain and one monitored, of two equal networks; who begins alternates.

    >>> small = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> cost = measure_monitor(2, make=small, batch=(4, 3, 2, 2), looks=1)
    >>> len(cost.plain), len(cost.monitored), len(cost.looked_at)
    (2, 2, 1)

    All rules look on, with labels told. ``looks`` pairs more (by default a quarter as many) are those in which the
    numbers are read, as in every ``EVERY``-th step of a run. What a rule finds in random data is not printed.
    """
    torch.manual_seed(0)
    plain, watched = _Trained(make()), _Trained(make())
    x, y = torch.randn(batch), torch.randint(0, 2, batch[:1])
    looks = max(1, rounds // 4) if looks is None else looks
    pairs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with collector_off(), monitor(watched.model, watched.optimizer, every=EVERY, warn=False) as run:
        for step in range(WARMUPS + rounds + looks):
            look = step >= WARMUPS + rounds
            run.step = EVERY * (step + 1) + (0 if look else 1 + step % (EVERY - 1))
            times = {}
            for one in (plain, watched) if step % 2 else (watched, plain):
                start = clock()
                if one is watched:
                    run.told(y)
                one.step(x, y)
                times[one] = clock() - start
            if step >= WARMUPS:
                pairs[look].append((times[plain], times[watched]))
    (plains, monitored), (beside, looked) = (_columns(pairs[look]) for look in (False, True))
    return Cost(plains, monitored, beside, looked, EVERY)


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
        f"monitored: {_percent(cost.between)} (quartiles {_percent(low)} to {_percent(high)}) in {len(cost.plain)} "
        "alternating pairs of steps",
        f"in every {cost.every}th step, with the numbers: {_percent(cost.looking)} in {len(cost.looked_at)} pairs",
        f"together: {_percent(cost.share)} (goal: at most {GOAL:.0%})".replace("3%", "3 %"),
    ])  # fmt: skip


def _percent(share: float) -> str:
    return f"{share * 100:+.1f} %"
