"""Which figures draw the records of which command. Whoever makes records registers how they are drawn.

A figure is a function from records to a section of the page, or to None if the records do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from batchnorm.records import RecordFile
    from batchnorm.report.sections import Section

Draw = Callable[["RecordFile"], "Section | None"]
GROUP = "batchnorm.figures"  # the entry points by which other packages register their own


class Drawing(NamedTuple):
    """How the records of one command are drawn: by which figures, under which title."""

    figures: str | tuple[Draw, ...]
    title: str


_REGISTERED: dict[str, Drawing] = {}


def register(command: str, figures: str | Sequence[Draw], title: str = "") -> None:
    """Register the figures that draw the records of a command, in the order of the page.

    >>> from batchnorm.records import RecordFile
    >>> from batchnorm.report.figures import figures_of
    >>> from batchnorm.report.sections import Headline
    >>> register("weather", [lambda records: Headline("Weather", f"{records.summary['rain']} mm of rain.")])
    >>> [section.sentence for section in figures_of(RecordFile("weather", {}, (), {"rain": 3}))]
    ['3 mm of rain.']

    ``figures`` may also be the name of a module with a tuple ``FIGURES``, imported when a page needs it. ``title``
    is the heading of a page that begins with these records. A second registration replaces the first.
    """
    _REGISTERED[command] = Drawing(figures if isinstance(figures, str) else tuple(figures), title)


def drawing_of(command: str) -> Drawing | None:
    """Return what is registered for a command, here or as an entry point of an installed package; None if nothing is.

    >>> drawing_of("weather on Mars") is None
    True
    """
    if command not in _REGISTERED:
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP, name=command):
            register(command, entry.value)
    return _REGISTERED.get(command)
