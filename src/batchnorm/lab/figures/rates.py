"""The best accuracy of every network at every rate it was trained at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchnorm.lab.records import from_records
from batchnorm.lab.summary import Lane, at_rate, rates_in, typical_best
from batchnorm.lab.variants import named
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.palette import look_of
from batchnorm.report.sections import Plot, Table

LOOKS = {  # where the name of a network has one
    "without BN": ("ink", "dash"),
    "with BN": ("blue", "solid"),
    "SkipInit": ("orange", "solid"),
    "clipping": ("purple", "dot"),
    "sigmoid, no BN": ("vermillion", "longdash"),
}
KINDS = {"relu": "ReLU", "sigmoid": "Sigmoid"}


def draw(records: RecordFile) -> Plot | None:
    """Draw the best accuracy of the median seed over the learning rate, one line a network.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)) is None
    True
    """
    found = by_network(from_records(records).lanes)
    if not found:
        return None
    return plot(
        "Which learning rates work",
        {network: {rate: (value, "") for rate, value in cells.items()} for network, cells in found.items()},
        "The best validation accuracy of the median seed, for every network at every learning rate it was trained at.",
    )


def trace(name: str, points: Sequence[tuple[float, tuple[float, str]]], number: int) -> dict[str, Any]:
    """Draw the accuracies of one network, with an open circle where some seed diverges.

    >>> trace("with BN", [(0.1, (0.9, "")), (0.3, (0.5, "*"))], 0)["marker"]["symbol"]
    ['circle', 'circle-open']
    """
    colour, dash = LOOKS.get(name) or look_of(number)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plotly_text(name),
        "x": [rate for rate, _ in points],
        "y": [value for _, (value, _) in points],
        "line": {"width": 2, "dash": dash},
        "marker": {"size": 8, "symbol": ["circle-open" if star else "circle" for _, (_, star) in points]},
        "hovertemplate": "%{y:.1%} at rate %{x:g}",
        "meta": {"colour": colour, "part": "line"},
    }


def plot(title: str, found: Mapping[str, Mapping[float, tuple[float, str]]], sentence: str) -> Plot:
    """Draw {network: {rate: (accuracy, mark)}}, all networks over one axis of rates.

    >>> plot("Rates", {"with BN": {0.1: (0.9, ""), 0.3: (0.5, "*")}}, "").table.rows
    (('with BN', '90.0%', '50.0%*'),)
    """
    names, rates = list(found), sorted({rate for cells in found.values() for rate in cells})
    grid = [[found[name].get(rate) for rate in rates] for name in names]
    traces = [trace(name, sorted(found[name].items()), number) for number, name in enumerate(names)]
    powers = range(math.floor(math.log10(rates[0])), math.ceil(math.log10(rates[-1])) + 1)
    axes = {
        "xaxis": {
            "type": "log",
            "title": {"text": "learning rate (log scale)"},
            "tickvals": [float(f"1e{power}") for power in powers],
            "range": [math.log10(rates[0]) - 0.1, math.log10(rates[-1]) + 0.1],
        },
        "yaxis": {"title": {"text": "best validation accuracy"}, "tickformat": ".0%"},
    }
    rows = tuple(
        (name, *("" if value is None else f"{value[0]:.1%}{value[1]}" for value in row))
        for name, row in zip(names, grid, strict=True)
    )
    return Plot(
        title,
        sentence,
        "Line chart of best accuracy over the learning rate, one line for each network; the table has the numbers.",
        {"data": traces, "layout": axes},
        height=320,
        table=Table(
            "Best accuracy",
            "",
            ("network", *(f"{rate:g}" for rate in rates)),
            rows,
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
