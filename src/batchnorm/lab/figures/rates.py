"""The learning-rate map: the best accuracy of every network at every rate it was trained at."""

from __future__ import annotations

from collections.abc import Iterable

from batchnorm.lab.records import from_records
from batchnorm.lab.summary import Lane, at_rate, rates_in, typical_best
from batchnorm.lab.variants import named
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.palette import CIVIDIS
from batchnorm.report.sections import Plot, Table

KINDS = {"relu": "ReLU", "sigmoid": "Sigmoid"}


def draw(records: RecordFile) -> Plot | None:
    """Draw network by rate, the best accuracy of the median seed as colour and as a number.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)) is None
    True
    """
    found = by_network(from_records(records).lanes)
    if not found:
        return None
    networks = list(found)
    rates = sorted({rate for cells in found.values() for rate in cells})
    grid = [[found[network].get(rate) for rate in rates] for network in networks]
    written = [["" if value is None else f"{value:.0%}" for value in row] for row in grid]
    heat = {
        "type": "heatmap",
        "x": [f"{rate:g}" for rate in rates],
        "y": [plotly_text(network) for network in networks],
        "z": grid,
        "text": written,
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
    return Plot(
        "Which learning rates work",
        "The best validation accuracy of the median seed, for every network and every learning rate it was trained at; "
        "an empty cell was not tried.",
        "Heat map of best accuracy by network and learning rate; the table below has the same numbers.",
        {
            "data": [heat],
            "layout": {
                "xaxis": {"type": "category", "title": {"text": "learning rate"}},
                "yaxis": {"autorange": "reversed", "automargin": True},
            },
        },
        height=120 + 52 * len(networks),
        table=Table(
            "Best accuracy",
            "",
            ("network", *(f"{rate:g}" for rate in rates)),
            tuple(
                (network, *("" if value is None else f"{value:.1%}" for value in row))
                for network, row in zip(networks, grid, strict=True)
            ),
            numbers=tuple(range(1, len(rates) + 1)),
        ),
    )


def by_network(lanes: Iterable[Lane]) -> dict[str, dict[float, float]]:
    """Group variants that are one network at several rates, and give the best accuracy at each.

    >>> from batchnorm.lab.curves import Curve, Member
    >>> curve = Curve(Member(0.5, 0), (10,), (0.9,), (1.0,))
    >>> by_network([Lane("BN-x5", (curve,), 0.5, 2.0)])
    {'ReLU, with BN': {0.5: 0.9}}
    """
    found: dict[str, dict[float, float]] = {}
    for lane in lanes:
        variant = named(lane.variant)
        cells = found.setdefault(f"{KINDS[variant.activation]}, {'with' if variant.normalised else 'without'} BN", {})
        for rate in rates_in(lane.curves):
            cells[rate] = typical_best(at_rate(lane.curves, rate))
    return dict(sorted(found.items(), key=lambda item: (item[0].split(",")[0], "without" not in item[0])))
