"""The learning-rate map: the best accuracy at every rate that was tried on the tuning seeds, at one depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchnorm.lab.curves import Curve
from batchnorm.lab.depth.arms import NORMALISED, PLAIN, SWEPT
from batchnorm.lab.depth.outcome import DepthOutcome, smoothed
from batchnorm.lab.depth.records import from_records
from batchnorm.lab.summary import at_rate, rates_in, typical_best
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.palette import CIVIDIS
from batchnorm.report.sections import Plot, Table


def draw(records: RecordFile) -> Plot | None:
    """Draw network by rate, the best accuracy of the median tuning seed as colour and as a number.

    >>> draw(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)) is None
    True
    """
    outcome = from_records(records)
    found = by_network(outcome)
    if not found:
        return None
    return plot(f"Which learning rates work, {outcome.settings.headline} blocks", found)


def plot(title: str, found: Mapping[str, Mapping[float, tuple[float, str]]]) -> Plot:
    """Draw {network: {rate: (accuracy, mark)}} as a map.

    >>> plot("Rates", {"with BN": {0.1: (0.9, ""), 0.3: (0.5, "*")}}).table.rows
    (('with BN', '90.0%', '50.0%*'),)
    """
    names, rates = list(found), sorted({rate for cells in found.values() for rate in cells})
    grid = [[found[name].get(rate) for rate in rates] for name in names]
    heat = {
        "type": "heatmap",
        "x": [f"{rate:g}" for rate in rates],
        "y": [plotly_text(name) for name in names],
        "z": [[None if value is None else value[0] for value in row] for row in grid],
        "text": [["" if value is None else f"{value[0]:.0%}{value[1]}" for value in row] for row in grid],
        "texttemplate": "%{text}",
        "colorscale": CIVIDIS,
        "zmin": 0,
        "zmax": 1,
        "xgap": 3,
        "ygap": 3,
        "hoverongaps": False,
        "hovertemplate": "%{y}, rate %{x}: %{z:.1%}<extra></extra>",
        "colorbar": {"tickformat": ".0%", "title": {"text": "best"}, "thickness": 12},
    }
    axes = {
        "xaxis": {"type": "category", "title": {"text": "learning rate"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    rows = tuple(
        (name, *("" if value is None else f"{value[0]:.1%}{value[1]}" for value in row))
        for name, row in zip(names, grid, strict=True)
    )
    return Plot(
        title,
        "The best validation accuracy of the median tuning seed at every rate that was tried; an empty cell was not. "
        "* Some seeds diverge there, so that rate is not chosen.",
        "Heat map of best accuracy by network and learning rate; the table below has the same numbers.",
        {"data": [heat], "layout": axes},
        height=120 + 52 * len(names),
        table=Table(
            "Best accuracy",
            "",
            ("network", *(f"{rate:g}" for rate in rates)),
            rows,
            numbers=tuple(range(1, len(rates) + 1)),
        ),
    )


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
