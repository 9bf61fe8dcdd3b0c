"""From records to the sections of a page, by the figures that are registered for them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from batchnorm.errors import BatchNormError
from batchnorm.records import RecordFile, values_of
from batchnorm.report import anything
from batchnorm.report.registry import Draw, drawing_of
from batchnorm.report.sections import Section
from batchnorm.report.stored import checked_section


def figures_of(records: RecordFile) -> Iterator[Section]:
    """Draw every figure that the records of a command have; records without any become a table.

    >>> [section.title for section in figures_of(RecordFile("unknown", {}, ()))]
    ['Records of unknown']
    """
    sections = [_drawn(draw, records) for draw in functions_of(records.command)]
    drawn = [section for section in sections if section is not None]
    if drawn:
        yield from drawn
    else:
        yield anything.draw(records)


def _drawn(draw: Draw, records: RecordFile) -> Section | None:
    """Draw one figure. What a command keeps in its settings and its summary is its own, so no schema knows it."""
    with values_of(f"these records of {records.command!r} cannot be drawn", "give the file as the command wrote it"):
        section = draw(records)
        return None if section is None else checked_section(section)


def functions_of(command: str) -> tuple[Draw, ...]:
    """Return the functions that draw the records of a command, importing the module they are registered by.

    >>> functions_of("unknown")
    ()
    """
    drawing = drawing_of(command)
    if drawing is None:
        return ()
    if not isinstance(drawing.figures, str):
        return drawing.figures
    try:
        return tuple(import_module(drawing.figures).FIGURES)
    except (ImportError, AttributeError) as error:
        raise BatchNormError(
            f"the figures for records of {command!r} are registered as the module {drawing.figures!r}, but {error}",
            do="register a module that can be imported and has a tuple of functions FIGURES",
        ) from error
