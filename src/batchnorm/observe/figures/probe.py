"""How the records of a probe are drawn: as the figure that is kept in them."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Section
from batchnorm.report.stored import from_plain


def draw(records: RecordFile) -> Section | None:
    """Draw the figure; None if the records have none.

    >>> draw(RecordFile("probe", {}, ())) is None
    True
    """
    return from_plain(records.summary["figure"]) if "figure" in records.summary else None


FIGURES = (draw,)
