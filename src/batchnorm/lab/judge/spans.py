"""The line of a quantity of several seeds: their median, in an area from the lowest to the highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchnorm.lab.judge.evidence import number
from batchnorm.report.sections import Line


def span_line(name: str, x: Sequence[float], rows: Sequence[Sequence[float | None]], colour: str, **place: Any) -> Line:
    """Return the line of some rows, one for each seed; ``place`` are other options of a `Line`.

    >>> line = span_line("with BN", [1, 2], [[1.0, 5.0], [2.0, 4.0], [3.0, 9.0]], "blue")
    >>> line.y, line.low, line.high
    ([2.0, 5.0], [1.0, 4.0], [3.0, 9.0])
    """
    columns = [sorted(map(number, column)) for column in zip(*rows, strict=True)]
    middle = [column[(len(column) - 1) // 2] for column in columns]
    low, high = [column[0] for column in columns], [column[-1] for column in columns]
    return Line(name, x, middle, colour, low=low, high=high, **place)
