"""What a race came to, in three figures."""

from __future__ import annotations

import math
import statistics

from batchnorm.lab.present import lines
from batchnorm.lab.store import from_records
from batchnorm.lab.summary import Row, Summary, summarise
from batchnorm.lab.variants import BASELINE, SIGMOID, named
from batchnorm.records import RecordFile
from batchnorm.report.sections import Card, Headline


def draw(records: RecordFile) -> Headline:
    """Draw the headline of a race.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.store import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)).cards
    ()
    """
    summary = summarise(from_records(records))
    options = summary.result.options
    return Headline(
        "What does Batch Normalization buy?",
        "One small Inception-style network learns to read 1,797 handwritten digits, without BN at its own best "
        "learning rate, and with BN at 1, 5 and 30 times that rate; then both again with sigmoids.",
        tuple(card for card in (soonest(summary), highest(summary), sigmoids(summary)) if card is not None),
        (
            lines(summary)[1],
            f"Plain SGD, batches of {options.batch_size}, weights by {options.init!r}; "
            f"the baseline chose from the rates {', '.join(f'{rate:g}' for rate in options.rates)}.",
        ),
    )


def soonest(summary: Summary) -> Card | None:
    """The variant with BN that needed the fewest steps to the baseline's best."""
    known = [(row.to_best, row) for row in summary.rows if row.variant != BASELINE and row.to_best is not None]
    steps, row = min(known, key=lambda pair: pair[0].median, default=(None, None))
    if steps is None or row is None or math.isinf(steps.median) or steps.ratio is None:
        return None
    return Card(
        f"{steps.ratio:.1f}× fewer steps",
        f"{row.variant} to the best accuracy without BN",
        f"{steps.median:g} steps; without BN {steps.ratio * steps.median:g}",
    )


def highest(summary: Summary) -> Card | None:
    """The best accuracy with BN and the same activation, beside the one without."""
    rows = {row.variant: row for row in summary.rows}
    ours = [row for name, row in rows.items() if named(name).normalised and named(name).activation == "relu"]
    if BASELINE not in rows or not ours:
        return None
    best = max(ours, key=middle)
    return Card(f"{middle(best):.1%}", f"best accuracy of {best.variant}", f"without BN {middle(rows[BASELINE]):.1%}")


def sigmoids(summary: Summary) -> Card | None:
    """What a sigmoid network reaches with BN, beside the same without."""
    rows = {row.variant: row for row in summary.rows}
    if not {SIGMOID, "BN-x5-Sigmoid"} <= rows.keys():
        return None
    with_bn, without = middle(rows["BN-x5-Sigmoid"]), middle(rows[SIGMOID])
    chance = f"without BN {without:.1%}; chance is {1 / summary.result.classes:.0%}"
    return Card(f"{with_bn:.1%}", "with sigmoids and BN", chance)


def middle(row: Row) -> float:
    """The median over the seeds of a variant's best accuracy."""
    return statistics.median(row.accuracies)
