"""The figures, one a file: each is a function from records to a section of the page, or None if they do not have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from batchnorm.records import RecordFile
from batchnorm.report.sections import Section

Draw = Callable[[RecordFile], Section | None]

OF_COMMAND = {
    "race": ("headline", "accuracy", "steps", "rates", "progress", "verdicts"),
    "watch": ("signal", "layers", "run"),
    "check": ("findings",),
    "bench": ("speed", "bench"),
    "calibrate": ("changes", "anything"),
    "fold": ("changes", "anything"),
}
ANY = "anything"


def figures_of(records: RecordFile) -> Iterator[Section]:
    """Draw every figure that the records of a command have; of a command without figures, the records as a table.

    >>> [section.title for section in figures_of(RecordFile("calibrate", {}, ()))]
    ['Records of calibrate']
    """
    drawn = False
    for name in OF_COMMAND.get(records.command, ()):
        draw: Draw = import_module(f"{__name__}.{name}").draw
        section = draw(records)
        if section is not None:
            drawn = True
            yield section
    if not drawn:
        anything: Draw = import_module(f"{__name__}.{ANY}").draw
        section = anything(records)
        if section is not None:
            yield section
