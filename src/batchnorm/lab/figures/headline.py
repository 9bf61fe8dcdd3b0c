"""The first screen: one sentence, and the steps of every variant as bars."""

from __future__ import annotations

import math
import statistics

from batchnorm.lab.figures.looks import look_of_variant
from batchnorm.lab.present import lines
from batchnorm.lab.records import from_records
from batchnorm.lab.summary import Summary, VariantRow, summarise
from batchnorm.lab.variants import BASELINE, SAME_RATE
from batchnorm.records import RecordFile
from batchnorm.report.sections import Bar, Headline


def draw(records: RecordFile) -> Headline:
    """Draw the headline of a race.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)).title
    'No arm was finished.'
    """
    summary = summarise(from_records(records))
    options = summary.result.options
    lead = (
        "One small Inception-style network reads 1,797 handwritten digits, without BN at its own best learning rate, "
        "and with BN at 1, 5 and 30 times that rate; then both again with sigmoids."
    )
    if summary.target is not None:
        lead = f"Steps to {summary.target:.1%}, the best without BN; medians of {options.seeds} seeds. {lead}"
    return Headline(
        sentence(summary),
        lead,
        notes=(
            lines(summary)[1],
            f"Plain SGD, batches of {options.batch_size}, weights by {options.init!r}; "
            f"the baseline chose from the rates {', '.join(f'{rate:g}' for rate in options.rates)}.",
        ),
        bars=tuple(bar(row) for row in summary.rows if row.to_best is not None),
    )


def sentence(summary: Summary) -> str:
    """Compare the networks with and without BN at one rate: no arm is picked for having been the fastest."""
    steps = {row.variant: row.to_best for row in summary.rows}
    if not {BASELINE, SAME_RATE} <= steps.keys():
        return "No arm was finished."
    plain, normed = steps[BASELINE], steps[SAME_RATE]
    if plain is None or normed is None:
        return "The network without Batch Normalization did not train: no ratio."
    if normed.ratio is None or math.isinf(normed.median):
        return f"At the same rate, with Batch Normalization: never. Without: {plain.median:,.0f} steps."
    much = f"{normed.ratio:.1f}x fewer" if normed.ratio >= 1 else f"{1 / normed.ratio:.1f}x more"
    return (
        f"At the same rate, with Batch Normalization: {normed.median:,.0f} steps. Without: {plain.median:,.0f}. {much}."
    )


def bar(row: VariantRow) -> Bar:
    """Draw the steps of a variant; one that never arrives has its best accuracy instead.

    >>> bar(VariantRow("BN-x5", 0.5, Steps((60.0,), 4.0), None, (0.9,), (0.9,), 0, 1.0)).text
    '60'
    """
    median = math.inf if row.to_best is None else row.to_best.median
    never = f"never: best {statistics.median(row.accuracies):.1%}"
    length, text = (0.0, never) if math.isinf(median) else (median, f"{median:,.0f}")
    return Bar(row.variant, length, text, look_of_variant(row.variant)[0])
