"""Figure 3 of the paper: steps to the baseline's best accuracy, with the paper's own row below each of ours."""

from __future__ import annotations

from batchnorm.lab.present import accuracy_cell, notes, rate_cell, ratio_cell, steps_cell
from batchnorm.lab.records import from_records
from batchnorm.lab.summary import SHARE, summarise
from batchnorm.lab.variants import PAPER_TARGET, named
from batchnorm.records import RecordFile
from batchnorm.report.sections import Table


def draw(records: RecordFile) -> Table | None:
    """Draw the table of steps.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)) is None
    True
    """
    summary = summarise(from_records(records))
    if not summary.rows:
        return None
    target = "" if summary.target is None else f" ({summary.target:.1%})"
    share = "" if summary.target is None else f" ({SHARE * summary.target:.1%})"
    rows: list[tuple[str, ...]] = []
    for row in summary.rows:
        paper = named(row.variant).paper
        rows.append(
            (
                row.variant,
                rate_cell(row, summary),
                steps_cell(row.to_best),
                ratio_cell(row.to_best),
                steps_cell(row.to_share),
                ratio_cell(row.to_share),
                accuracy_cell(row.accuracies),
            )
        )
        rows.append(("the paper, ImageNet", "", paper.steps, paper.ratio, "", "", paper.accuracy))
    return Table(
        "Steps to the same accuracy",
        "How many steps each variant needs to the best accuracy without BN, and to 95% of it; below each, in grey, "
        f"what the paper reports of it on ImageNet (steps to {PAPER_TARGET}), its own Figure 3.",
        (
            "variant",
            "rate",
            f"steps to the best{target}",
            "times fewer",
            f"steps to 95% of it{share}",
            "times fewer",
            "best accuracy",
        ),
        tuple(rows),
        numbers=(1, 2, 3, 4, 5, 6),
        muted=tuple(range(1, len(rows), 2)),
        notes=(
            f"Medians over {summary.result.options.seeds} seeds, in brackets how many of them arrived, below that the "
            "spread; ratios are of medians.",
            *notes(summary),
        ),
    )
