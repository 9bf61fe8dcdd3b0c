"""One quantity: its name, what it is measured of, and how. Every file in ``quantities`` holds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OF = ("signal", "weights", "gradients")


@dataclass(frozen=True)
class Reading:
    """The samples of a quantity, and the entries of their setting.

    >>> Reading((0.5,)).setting
    {}
    """

    samples: tuple[float, ...]
    setting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantity:
    """A quantity and how it is read.

    >>> Quantity("mean", "signal", lambda signal: Reading((signal.mean,))).unit
    ''

    ``of`` says what ``read`` is given and when: a ``Signal`` as it passes ("signal"), the ``Weights`` of a layer before
    the optimiser's step ("weights"), or the same when the gradients are complete ("gradients"). ``read`` returns None
    where the quantity has no meaning.
    """

    name: str
    of: str
    read: Callable[[Any], Reading | None]
    unit: str = ""
