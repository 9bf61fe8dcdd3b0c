"""Figure 2 of the paper: validation accuracy over the training steps, one line a variant."""

from __future__ import annotations

import math
from typing import Any

from batchnorm.lab.figures.looks import look_of_variant
from batchnorm.lab.records import from_records
from batchnorm.lab.summary import Lane, VariantRow, summarise
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.sections import Plot, Table

READING = (
    "Further left is sooner: the step axis is logarithmic. Lines are medians of the seeds; point at one for their span."
)
MARKED = " A diamond marks where one meets the best without BN (dotted)."


def draw(records: RecordFile) -> Plot | None:
    """Draw the medians of the seeds, the span of the seeds behind them, and where each meets the baseline's best.

    >>> from batchnorm.lab.options import Options
    >>> from batchnorm.lab.records import to_records
    >>> from batchnorm.lab.summary import Result
    >>> draw(to_records(Result(Options(), (), 450, 10), threads=2)) is None
    True
    """
    summary = summarise(from_records(records))
    if not summary.rows:
        return None
    lanes = {lane.variant: lane for lane in summary.result.lanes}
    traces: list[dict[str, Any]] = []
    for row in summary.rows:
        traces += traces_of(row, lanes[row.variant], summary.target)
    steps = lanes[summary.rows[0].variant].curves[0].steps
    return Plot(
        "Accuracy over the steps",
        READING + ("" if summary.target is None else MARKED),
        "Line chart of validation accuracy over training steps, one line for each variant; the table below has the "
        "same numbers.",
        {"data": traces, "layout": layout(steps, summary.target)},
        height=460,
        table=numbers(summary.rows, steps),
        notes=("The paper's Figure 2 in small: the same variants, on digits instead of ImageNet.",),
    )


def traces_of(row: VariantRow, lane: Lane, target: float | None) -> list[dict[str, Any]]:
    """The band, the line and, if the target was reached, the diamond of one variant.

    >>> from batchnorm.lab.curves import Curve, Member
    >>> lane = Lane("BN-x5", (Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1.0, 0.5)),), 0.1, 2.0)
    >>> row = VariantRow("BN-x5", 0.1, None, None, (0.9,), (0.2, 0.9), 0, 2.0)
    >>> [trace["mode"] for trace in traces_of(row, lane, None)]
    ['lines', 'lines']
    """
    colour, dash = look_of_variant(row.variant)
    steps = list(lane.chosen[0].steps)
    seeds = [[0.0 if math.isnan(v) else v for v in curve.accuracy] for curve in lane.chosen]
    low, high = ([pick(column) for column in zip(*seeds, strict=True)] for pick in (min, max))
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": steps + steps[::-1],
        "y": high + low[::-1],
        "fill": "toself",
        "line": {"width": 0},
        "opacity": 0.16,
        "hoverinfo": "skip",
        "meta": {"colour": colour, "part": "band"},
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": plotly_text(row.variant),
        "x": steps,
        "y": list(row.median_accuracy),
        "line": {"width": 2.5, "dash": dash},
        "hovertemplate": "%{y:.1%} at step %{x}",
        "meta": {"colour": colour, "part": "line"},
    }
    if target is None or row.to_best is None or math.isinf(row.to_best.median):
        return [band, line]
    diamond = {
        "type": "scatter",
        "mode": "markers",
        "name": plotly_text(row.variant),
        "x": [row.to_best.median],
        "y": [target],
        "marker": {"symbol": "diamond", "size": 11},
        "hovertemplate": "the best without BN after %{x} steps",
        "meta": {"colour": colour, "part": "diamond"},
    }
    return [band, line, diamond]


def layout(steps: tuple[int, ...], target: float | None) -> dict[str, Any]:
    """Axes, and a line at the target.

    >>> layout((20, 400), None)["xaxis"]["tickvals"]
    [20, 50, 100, 200]
    """
    ticks = [m * 10**p for p in range(7) for m in (1, 2, 5) if steps[0] <= m * 10**p <= steps[-1]]
    shapes = []
    if target is not None:
        level = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
        shapes.append({**level, "line": {"width": 1, "dash": "dot"}})
    return {
        "xaxis": {
            "type": "log",
            "title": {"text": "training steps (log scale)"},
            "tickvals": ticks or list(steps),
            "range": [math.log10(0.95 * steps[0]), math.log10(1.05 * steps[-1])],
        },
        "yaxis": {"title": {"text": "validation accuracy"}, "tickformat": ".0%"},
        "shapes": shapes,
    }


def numbers(rows: tuple[VariantRow, ...], steps: tuple[int, ...]) -> Table:
    """The same lines as a table: a row for each evaluated step.

    >>> numbers((VariantRow("BN-x5", 0.1, None, None, (0.9,), (0.25, 0.9), 0, 2.0),), (10, 20)).rows
    (('10', '25.0%'), ('20', '90.0%'))
    """
    body = tuple(
        (str(step), *(f"{row.median_accuracy[index]:.1%}" for row in rows)) for index, step in enumerate(steps)
    )
    columns = ("step", *(row.variant for row in rows))
    return Table("Median validation accuracy", "", columns, body, numbers=tuple(range(len(columns))))
