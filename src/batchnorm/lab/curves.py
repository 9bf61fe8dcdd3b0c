"""What training a network leaves behind, and the two questions asked of it: how high, and how soon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NEVER = math.inf


@dataclass(frozen=True)
class Member:
    """One network: how it is trained, and the seed of its weights and of its order of examples.

    ``schedule`` is a name in `batchnorm.lab.trainer.SCHEDULES`; ``clip`` is the largest norm of its gradient.
    """

    learning_rate: float
    seed: int
    momentum: float = 0.0
    schedule: str = "constant"
    clip: float | None = None


@dataclass(frozen=True)
class Curve:
    """Validation accuracy and mean training loss of one member at each evaluated step.

    Both are NaN from the first evaluation after the member diverged.
    """

    member: Member
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    diverged_at: int | None = None


def curve_of(fields: Mapping[str, Any]) -> Curve:
    """Return a curve from its fields as JSON has them.

    >>> fields = {"member": {"learning_rate": 0.1, "seed": 0}, "steps": [10], "accuracy": [None], "loss": [2.0]}
    >>> curve_of({**fields, "diverged_at": 3}).accuracy
    (nan,)
    """
    accuracy, loss = (tuple(math.nan if v is None else v for v in fields[key]) for key in ("accuracy", "loss"))
    return Curve(Member(**fields["member"]), tuple(fields["steps"]), accuracy, loss, fields["diverged_at"])


def best_accuracy(curve: Curve) -> float:
    """Give the highest accuracy the member ever had; 0 if it had none.

    >>> best_accuracy(Curve(Member(0.1, 0), (10, 20, 30), (0.5, 0.75, math.nan), (1.0, 0.5, math.nan)))
    0.75
    """
    return max((value for value in curve.accuracy if not math.isnan(value)), default=0.0)


def steps_to(curve: Curve, target: float) -> float:
    """Give the first evaluated step at or above the target; infinity if there is none.

    >>> steps_to(Curve(Member(0.1, 0), (10, 20, 30), (0.5, 0.75, 0.7), (1.0, 0.5, 0.6)), target=0.7)
    20
    """
    reached = (step for step, value in zip(curve.steps, curve.accuracy, strict=True) if value >= target)
    return next(reached, NEVER)


def median_curve(curves: Iterable[Curve]) -> tuple[float, ...]:
    """Give the median accuracy over the seeds at each evaluated step; a diverged member counts as 0.

    >>> one = Curve(Member(0.1, 0), (10, 20), (0.5, math.nan), (1.0, math.nan))
    >>> median_curve([one])
    (0.5, 0.0)
    """
    columns = zip(*(curve.accuracy for curve in curves), strict=True)
    return tuple(statistics.median(0.0 if math.isnan(value) else value for value in column) for column in columns)
