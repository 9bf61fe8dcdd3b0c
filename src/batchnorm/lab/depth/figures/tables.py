"""The claims of the race, and Figure 3 of the paper at one depth with the paper's own row below each of ours."""

from __future__ import annotations

from batchnorm.lab.depth.arms import PAPER_NAMES, SHARE
from batchnorm.lab.depth.outcome import depth_of, depths_of
from batchnorm.lab.depth.present import little_gain, notes, regime
from batchnorm.lab.depth.records import from_records
from batchnorm.lab.figures.verdicts import KINDS
from batchnorm.lab.present import ratio_cell, steps_cell
from batchnorm.lab.variants import PAPER_TARGET, named
from batchnorm.records import RecordFile
from batchnorm.report.sections import Table


def claims(records: RecordFile) -> Table | None:
    """Draw one row for each claim.

    >>> claims(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)).rows[0][1]
    'not judged'
    """
    found = records.summary["claims"]
    return Table(
        "Five claims, here",
        "Each by a rule that was written before the run: an exact rank test over fresh seeds, or a count of them.",
        ("claim", "in this run", "evidence"),
        tuple((each["claim"], each["outcome"], each["evidence"]) for each in found),
        badges=KINDS,
    )


def arms(records: RecordFile) -> Table | None:
    """Draw the table of Figure 3.

    >>> arms(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)) is None
    True
    """
    outcome = from_records(records)
    depth = depth_of(outcome, outcome.settings.headline)
    if depth is None:
        return None
    rows: list[tuple[str, ...]] = []
    muted = []
    for name, entry in outcome.arms(depth.blocks).items():
        steps, share = depth.steps.get(name), depth.to_share.get(name)
        cells = (steps_cell(steps), ratio_cell(steps), steps_cell(share), ratio_cell(share))
        lost = f"{depth.diverged[name]}/{len(entry.curves)}"
        rows.append((name, f"{entry.rate:g}", *cells, f"{depth.accuracy[name]:.1%}", lost))
        if name in PAPER_NAMES:
            paper = named(PAPER_NAMES[name]).paper
            muted.append(len(rows))
            about = f"the paper, ImageNet: {PAPER_NAMES[name]}"
            rows.append((about, "", paper.steps, paper.ratio, "", "", paper.accuracy, ""))
    target = "" if depth.target is None else f" ({depth.target:.1%})"
    part = "" if depth.target is None else f" ({SHARE * depth.target:.1%})"
    columns = (
        "arm", "rate", f"steps to the best{target}", "times fewer", f"steps to 95% of it{part}", "times fewer",
        "best accuracy", "diverged",
    )  # fmt: skip
    return Table(
        f"Steps to the same accuracy, {depth.blocks} blocks",
        f"Steps to the best accuracy without BN, and to 95% of it; in grey what the paper reports (steps to "
        f"{PAPER_TARGET} on ImageNet), its own Figure 3.",
        columns,
        tuple(rows),
        numbers=tuple(range(1, len(columns))),
        muted=tuple(muted),
        notes=(
            "Medians over the fresh seeds, in brackets how many of them arrived, below that the spread.",
            *(note for note in notes(outcome) if note not in (regime(outcome), little_gain(depths_of(outcome)))),
        ),
    )
