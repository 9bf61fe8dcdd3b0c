"""A model under repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from batchnorm.doctor.subject import Forward
from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import OURS
from batchnorm.records import Change


class Needed(BatchNormError):
    """Raised if a repair lacks an input; nothing was changed yet."""


@dataclass
class Repair:
    """A model under repair: a copy, with its optimisers, and what the repairs may need.

    >>> Repair(nn.BatchNorm1d(2)).need("example", "BN101")
    Traceback (most recent call last):
    batchnorm.doctor.repair.Needed: fix: repairing BN101 needs an example; give example=, or leave its findings out

    A rule's ``fix`` changes ``model`` (it may put another in its place, as the verbs do, giving them ``optimizers``).
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    example: Any = None
    batches: tuple[Any, ...] = ()
    forward: Forward | None = None
    before: nn.Module | None = None  # the model before another tool changed it, if that was given to the check
    process_group: Any = None

    def need(self, what: str, code: str) -> Any:
        """Return the example or the batches. Raises `Needed` if there are none: the findings are then left alone.

        Call it before anything is changed.
        """
        value = getattr(self, what)
        if value is None or (what == "batches" and not value):
            raise Needed(
                f"repairing {code} needs {'data' if what == 'batches' else 'an example'}",
                where="fix",
                do=f"give {'data=' if what == 'batches' else 'example='}, or leave its findings out",
            )
        return value


PLAIN = tuple(OURS)  # what `to_ours` can exchange


def to_ours(path: str, layer: nn.Module) -> Change | str:
    """Change torch's layer into ours in place, with its tensors and hooks; or return why that is impossible.

    >>> layer = nn.BatchNorm2d(3)
    >>> print(to_ours("bn1", layer))
    bn1: class torch.nn.BatchNorm2d -> batchnorm.BatchNorm2d
    >>> to_ours("bn1", layer)
    'it is a layer of ours already'
    """
    old = type(layer)
    if old in OURS.values():
        return "it is a layer of ours already"
    if old not in OURS:
        return f"{old.__name__} is a custom class, and may compute something else"
    layer.__class__ = OURS[old]
    return Change(path, "class", f"torch.nn.{old.__name__}", f"batchnorm.{old.__name__}")
