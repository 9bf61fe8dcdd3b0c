"""The learning-rate map over time: how each network's accuracy grows, step by step, at every rate."""

from __future__ import annotations

from batchnorm.lab.curves import median_curve
from batchnorm.lab.records import from_records
from batchnorm.lab.summary import at_rate, rates_in
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.palette import CIVIDIS
from batchnorm.report.sections import Plot, Table, thinned

MOST_COLUMNS = 8  # of the table beside the map


def draw(records: RecordFile) -> Plot | None:
    """Draw a row for each variant and rate, steps to the right, the median accuracy as colour.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)) is None
    True
    """
    rows = [
        (f"{lane.variant} at {rate:g}", median_curve(at_rate(lane.curves, rate)))
        for lane in from_records(records).lanes
        for rate in rates_in(lane.curves)
    ]
    if not rows:
        return None
    steps = list(records.configuration["evaluated_at"])
    shown = thinned(range(len(steps)), MOST_COLUMNS)
    heat = {
        "type": "heatmap",
        "x": steps,
        "y": [plotly_text(name) for name, _ in rows],
        "z": [list(values) for _, values in rows],
        "colorscale": CIVIDIS,
        "zmin": 0,
        "zmax": 1,
        "ygap": 2,
        "hovertemplate": "%{y}, step %{x}: %{z:.1%}<extra></extra>",
        "colorbar": {"tickformat": ".0%", "title": {"text": "accuracy"}, "thickness": 12},
    }
    return Plot(
        "How each rate gets there",
        "A row for each variant and learning rate, steps to the right: the sooner a row turns bright, the faster it "
        "learns; a row that stays dark never does.",
        "Heat map of median validation accuracy, a row for each variant and rate, training steps to the right; "
        "the table below has some of the steps.",
        {
            "data": [heat],
            "layout": {
                "xaxis": {"title": {"text": "training steps"}},
                "yaxis": {"autorange": "reversed", "automargin": True},
            },
        },
        height=110 + 30 * len(rows),
        table=Table(
            "Median validation accuracy, at some of the steps",
            "",
            ("variant and rate", *(f"step {steps[index]}" for index in shown)),
            tuple((name, *(f"{values[index]:.1%}" for index in shown)) for name, values in rows),
            numbers=tuple(range(1, len(shown) + 1)),
        ),
    )
