"""How the records of a race of the user's own network are drawn."""

from __future__ import annotations

from batchnorm.lab.figures.verdicts import KINDS
from batchnorm.records import RecordFile
from batchnorm.report.sections import Headline, Table


def headline(records: RecordFile) -> Headline:
    """Draw the sentence and the lines of the terminal.

    >>> records = RecordFile("race --model", {"model": "net.py:make"}, (), {"sentence": "N.", "lines": ["N.", "M."]})
    >>> headline(records).notes
    ('M.',)
    """
    lines = tuple(line for line in records.summary["lines"][1:] if line and not line.startswith("  "))
    about = f"{records.configuration['model']}, with Batch Normalization inserted and without."
    return Headline(records.summary["sentence"], about, notes=lines)


def claims(records: RecordFile) -> Table:
    """Draw the verdict."""
    rows = tuple((each["claim"], each["outcome"], each["evidence"]) for each in records.summary["claims"])
    return Table("The claim, here", "An exact rank test.", ("claim", "in this run", "evidence"), rows, badges=KINDS)


def sweep(records: RecordFile) -> Table:
    """Draw the best accuracy at every rate."""
    rows = tuple(
        (f"{row['rate']:g}", f"{row['without']:.1%}", f"{row['with']:.1%}") for row in records.summary["sweep"]
    )
    return Table(
        "Which learning rates work",
        "The best validation accuracy of the median tuning seed, both networks over one grid.",
        ("rate", "without BN", "with BN"),
        rows,
        numbers=(0, 1, 2),
    )


FIGURES = (headline, claims, sweep)
