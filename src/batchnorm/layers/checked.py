"""Attributes of a layer that choose what it does: a wrong value is refused when it is set, not at the next forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, ClassVar, get_args

from torch import nn

from batchnorm.checks import NONFINITE
from batchnorm.errors import BatchNormError
from batchnorm.kernels.native import ACTIVATIONS
from batchnorm.layers.options import OneValue, Statistics

STATISTICS, ONE_VALUE = get_args(Statistics), get_args(OneValue)


def one_of(*choices: object) -> Callable[[Any], str]:
    """Return what tells the choices of a value that is none of them.

    >>> one_of("a", None)("b"), one_of("a", None)("a")
    ("use one of 'a', None", '')
    """
    advice = f"use one of {', '.join(map(repr, choices))}"
    kinds = tuple({int if isinstance(choice, bool) else type(choice) for choice in choices})  # 0 is False

    def wrong(value: Any) -> str:
        return "" if isinstance(value, kinds) and value in choices else advice

    return wrong


def number(least: float, most: float = float("inf"), *, or_none: bool = False) -> Callable[[Any], str]:
    """Return what tells the range of a value outside it, or that is no number.

    >>> number(0, 1)(0.5), number(0, 1)(2), number(0)("1e-5")
    ('', 'use a number from 0 to 1', 'use a number from 0 up')
    """
    within = f"from {least:g} up" if most == float("inf") else f"from {least:g} to {most:g}"
    advice = f"use a number {within}" if least > -float("inf") else "use a number"

    def wrong(value: Any) -> str:
        if isinstance(value, Real):
            return "" if least <= float(value) <= most else advice
        return "" if hasattr(value, "__float__") or (or_none and value is None) else advice

    return wrong


def function_or(wrong: Callable[[Any], str]) -> Callable[[Any], str]:
    """Let a function through, too.

    >>> function_or(number(1))(abs), function_or(number(1))(0.5)
    ('', 'use a number from 1 up, or a function')
    """
    return lambda value: "" if callable(value) else (advice := wrong(value)) and f"{advice}, or a function"


def whole(value: Any) -> str:
    """Return what to give instead of a value that is no whole number from 1 up.

    >>> whole(3), whole(True)
    ('', 'use a whole number from 1 up')
    """
    fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return "" if fits else "use a whole number from 1 up"


SWITCHES: dict[str, Callable[[Any], str]] = {
    "activation": one_of(*ACTIVATIONS, None),
    "negative_slope": number(-float("inf")),
    "statistics": one_of(*STATISTICS),
    "update": one_of(None, True, False),
    "nonfinite": one_of(*NONFINITE),
    "one_value": one_of(*ONE_VALUE),
    "momentum": number(0, 1, or_none=True),
    "eps": number(0),
    "learn": one_of(True, False),
}


class Checked(nn.Module):
    """A layer whose switches can be set to their values only.

    >>> from batchnorm import BatchNorm2d
    >>> BatchNorm2d(8).statistics = "mini"
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: BatchNorm2d: statistics is 'mini'; use one of 'auto', 'batch', 'running'
    """

    switches: ClassVar[Mapping[str, Callable[[Any], str]]] = SWITCHES

    def __setattr__(self, name: str, value: Any) -> None:
        wrong = self.switches.get(name)
        if wrong is not None and (advice := wrong(value)):
            raise BatchNormError(f"{name} is {value!r}", where=type(self).__name__, do=advice)
        super().__setattr__(name, value)
