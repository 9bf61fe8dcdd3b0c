"""Figure 2 of the paper at one depth: validation accuracy over the training steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchnorm.lab.curves import Curve, median_curve
from batchnorm.lab.depth.figures.looks import LOOKS
from batchnorm.lab.depth.outcome import Depth, DepthOutcome, depth_of, smoothed
from batchnorm.lab.depth.records import from_records
from batchnorm.lab.figures.accuracy import MARKED, READING, layout
from batchnorm.lab.summary import Steps
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.sections import Plot, Table, thinned

ROWS = 40  # of the table: every validation would be hundreds


def draw(records: RecordFile) -> Plot | None:
    """Draw the medians of the seeds, their span, and where each meets the plain network's best.

    >>> draw(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)) is None
    True
    """
    outcome = from_records(records)
    depth = depth_of(outcome, outcome.settings.headline)
    if depth is None:
        return None
    traces: list[dict[str, Any]] = []
    found = arms(outcome, depth)
    for name, curves in found.items():
        traces += traces_of(name, curves, LOOKS[name], depth.target, depth.steps.get(name))
    steps = next(iter(found.values()))[0].steps
    return Plot(
        f"Accuracy over the steps, {depth.blocks} blocks",
        READING + ("" if depth.target is None else MARKED),
        "Line chart of validation accuracy over training steps, one line for each arm; the table has the numbers.",
        {"data": traces, "layout": layout(steps, depth.target)},
        height=400,
        table=numbers(found),
        notes=(f"Each accuracy is the mean of {outcome.settings.smoothed_over} validations.",),
    )


def arms(outcome: DepthOutcome, depth: Depth) -> dict[str, list[Curve]]:
    """Return the smoothed curves of the arms that are drawn."""
    entries, window = outcome.at(depth.blocks), outcome.settings.smoothed_over
    return {name: [smoothed(c, window) for c in entries[name].curves] for name in LOOKS if name in entries}


def traces_of(
    name: str, curves: list[Curve], look: tuple[str, str], target: float | None, found: Steps | None
) -> list[dict[str, Any]]:
    """Return the band, the line, and if the target was reached the diamond.

    >>> from batchnorm.lab.curves import Member
    >>> curve = Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1.0, 1.0))
    >>> band, line = traces_of("BN x5", [curve], ("blue", "solid"), None, None)
    >>> line["y"]
    [0.2, 0.9]
    """
    colour, dash = look
    steps, columns = list(curves[0].steps), list(zip(*(curve.accuracy for curve in curves), strict=True))
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": steps + steps[::-1],
        "y": [max(column) for column in columns] + [min(column) for column in columns][::-1],
        "fill": "toself",
        "line": {"width": 0},
        "opacity": 0.14,
        "hoverinfo": "skip",
        "meta": {"colour": colour, "part": "band"},
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": plotly_text(name),
        "x": steps,
        "y": list(median_curve(curves)),
        "line": {"width": 2.5, "dash": dash},
        "hovertemplate": "%{y:.1%} at step %{x}",
        "meta": {"colour": colour, "part": "line"},
    }
    if target is None or found is None or found.median == math.inf:
        return [band, line]
    return [band, line, mark(name, found.median, target, colour)]


def mark(name: str, x: float, y: float, colour: str) -> dict[str, Any]:
    """Return a diamond.

    >>> mark("BN x5", 200, 0.9, "blue")["x"]
    [200]
    """
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plotly_text(name),
        "x": [x],
        "y": [y],
        "marker": {"symbol": "diamond", "size": 11},
        "hovertemplate": "%{y} at %{x}",
        "meta": {"colour": colour, "part": "diamond"},
    }


def numbers(arms: Mapping[str, list[Curve]]) -> Table:
    """Write the same lines as a table, some of the validations.

    >>> from batchnorm.lab.curves import Member
    >>> numbers({"BN x5": [Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1.0, 1.0))]}).rows
    (('10', '20.0%'), ('20', '90.0%'))
    """
    steps = next(iter(arms.values()))[0].steps
    medians = {name: median_curve(curves) for name, curves in arms.items()}
    rows = tuple(
        (str(steps[index]), *(f"{values[index]:.1%}" for values in medians.values()))
        for index in thinned(range(len(steps)), ROWS)
    )
    return Table("Median validation accuracy", "", ("step", *medians), rows, numbers=tuple(range(len(medians) + 1)))
