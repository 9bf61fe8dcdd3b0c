"""The pair that a verb returns: the changed model and the report, with tables in notebooks."""

from __future__ import annotations

from html import escape
from typing import Any, TypeVar

Model = TypeVar("Model")
Reported = TypeVar("Reported")


class Changed(tuple[Model, Reported]):
    """A pair ``(model, report)`` that shows its report in a notebook.

    >>> import batchnorm as bn
    >>> changed = bn.freeze(bn.BatchNorm1d(2))
    >>> model, report = changed
    >>> "1 module changed" in changed._repr_html_()
    True
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        model, report = self
        draw: Any = getattr(report, "_repr_html_", lambda: f"<pre>{escape(str(report))}</pre>")
        name = escape(type(model).__name__)
        return f"{draw()}<details><summary>the model: {name}</summary><pre>{escape(repr(model))}</pre></details>"
