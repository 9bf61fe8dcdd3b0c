"""The best accuracy at every rate that was tried on the tuning seeds, at one depth."""

from __future__ import annotations

from collections.abc import Sequence

from batchnorm.lab.curves import Curve
from batchnorm.lab.depth.arms import NORMALISED, PLAIN, SWEPT
from batchnorm.lab.depth.outcome import DepthOutcome, smoothed
from batchnorm.lab.depth.records import from_records
from batchnorm.lab.figures.rates import plot
from batchnorm.lab.summary import at_rate, rates_in, typical_best
from batchnorm.records import RecordFile
from batchnorm.report.sections import Plot

TUNED = (
    "The best validation accuracy of the median tuning seed at every rate that was tried. Open circles: some seeds "
    "diverge there, so that rate is not chosen (* in the table)."
)


def draw(records: RecordFile) -> Plot | None:
    """Draw the best accuracy of the median tuning seed over the learning rate, one line a network.

    >>> draw(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)) is None
    True
    """
    outcome = from_records(records)
    found = by_network(outcome)
    if not found:
        return None
    return plot(f"Which learning rates work, {outcome.settings.headline} blocks", found, TUNED)


def by_network(outcome: DepthOutcome) -> dict[str, dict[float, tuple[float, str]]]:
    """Return the best accuracy of the median tuning seed for each network and rate, and a star if a seed diverged.

    BN's three arms are one network.

    >>> by_network(DepthOutcome(DepthSettings(), (), 10, 450))
    {}
    """
    entries = outcome.at(outcome.settings.headline)
    found: dict[str, dict[float, tuple[float, str]]] = {}
    groups = {PLAIN.name: [PLAIN.name], "with BN": [arm.name for arm in NORMALISED]}
    groups |= {arm.name: [arm.name] for arm in SWEPT}
    for name, arms in groups.items():
        curves = [
            smoothed(curve, outcome.settings.smoothed_over)
            for arm in arms
            if arm in entries
            for curve in entries[arm].tuning
        ]
        if curves:
            found[name] = {rate: cell(at_rate(curves, rate)) for rate in rates_in(curves)}
    return found


def cell(curves: Sequence[Curve]) -> tuple[float, str]:
    """Return the best accuracy of the median seed, and a star if some seed diverged.

    >>> cell([Curve(Member(0.1, 0), (10,), (0.9,), (1.0,), diverged_at=12)])
    (0.9, '*')
    """
    return typical_best(curves), "*" if any(curve.diverged_at is not None for curve in curves) else ""
