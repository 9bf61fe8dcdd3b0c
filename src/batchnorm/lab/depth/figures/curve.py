"""How the advantage grows with depth, with the paper's figure beside it."""

from __future__ import annotations

import math
from typing import Any

from batchnorm.lab.depth.arms import NORMALISED, PAPER_RATIO, PLAIN
from batchnorm.lab.depth.figures.accuracy import mark
from batchnorm.lab.depth.figures.looks import LOOKS
from batchnorm.lab.depth.outcome import Depth, depths_of
from batchnorm.lab.depth.present import ratio_or_never
from batchnorm.lab.depth.records import from_records
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text
from batchnorm.report.sections import Plot, Table


def draw(records: RecordFile) -> Plot | None:
    """Draw times fewer steps against the number of blocks, one line for each rate with BN.

    >>> draw(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)) is None
    True
    """
    depths = depths_of(from_records(records))
    trained = [depth for depth in depths if depth.target is not None]
    if len(trained) < 2:
        return None
    traces: list[dict[str, Any]] = []
    for arm in NORMALISED:
        ratios = [ratio(depth, arm.name) for depth in trained]
        known = [(depth.blocks, value) for depth, value in zip(trained, ratios, strict=True) if value is not None]
        if not known:
            continue
        colour, dash = LOOKS[arm.name]
        traces.append(line(arm.name, [depth.blocks for depth in trained], ratios, colour, dash))
        traces += [mark(arm.name, *place, colour) for place in known[-1:]]
    blocks = [depth.blocks for depth in trained]
    paper = f"the paper, ImageNet, BN-x5: {PAPER_RATIO}x"
    traces.append(line(paper, [blocks[0], blocks[-1]], [PAPER_RATIO] * 2, "ink", "dot"))
    values = [value for trace in traces for value in trace["y"] if value is not None]
    untrained = ", ".join(str(depth.blocks) for depth in depths if depth.target is None)
    notes = [f"At {untrained} blocks the network without BN does not train: there is no ratio."] if untrained else []
    return Plot(
        "Times fewer steps, against depth",
        "How many times fewer steps the network with BN needs to the best of the plain network of the same depth, at "
        "1, 5 and 30 times the plain network's best rate. The dotted line is the paper's figure, not measured here.",
        "Line chart of the ratio of steps against the number of residual blocks; the table below has the numbers.",
        {"data": traces, "layout": layout(blocks, values)},
        height=380,
        table=numbers(depths),
        notes=tuple(notes),
    )


def ratio(depth: Depth, name: str) -> float | None:
    """Return an arm's ratio, or None where there is none to quote."""
    found = depth.steps.get(name)
    return None if found is None or found.median == math.inf else found.ratio


def line(name: str, x: list[int], y: list[Any], colour: str, dash: str) -> dict[str, Any]:
    """Return one line.

    >>> line("BN x5", [2, 6], [1.5, None], "blue", "solid")["meta"]["part"]
    'line'
    """
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plotly_text(name),
        "x": x,
        "y": y,
        "line": {"width": 2.5, "dash": dash},
        "hovertemplate": "%{y:.1f}x at %{x} blocks",
        "meta": {"colour": colour, "part": "line"},
    }


def layout(blocks: list[int], values: list[float]) -> dict[str, Any]:
    """Return the axes: blocks, and ratios on a logarithmic scale.

    >>> layout([2, 6], [1.0, 20.0])["yaxis"]["tickvals"]
    [1, 2, 5, 10, 20]
    """
    low, high = min([*values, 1.0]), max(values)
    ticks = [m * 10**p for p in range(-2, 5) for m in (1, 2, 5) if 0.9 * low <= m * 10**p <= 1.1 * high]
    return {
        "xaxis": {
            "title": {"text": "residual blocks"},
            "tickvals": blocks,
            "range": [blocks[0] - 0.7, blocks[-1] + 0.7],
        },
        "yaxis": {
            "type": "log",
            "title": {"text": "times fewer steps"},
            "tickvals": ticks,
            "range": [math.log10(0.8 * low), math.log10(1.5 * high)],
        },
    }


def numbers(depths: list[Depth]) -> Table:
    """Write the same figures as a table, with the depths that do not train."""
    rows: list[tuple[str, ...]] = []
    for depth in depths:
        best = f"{depth.plain_best:.1%}"
        if depth.target is None:
            rows.append((str(depth.blocks), f"{depth.rates[PLAIN.name]:g}", f"{best}: untrained", "", "", "", ""))
            continue
        cells = (ratio_or_never(depth.steps.get(arm.name), arm.name == depth.fastest) for arm in NORMALISED)
        plain = depth.steps[PLAIN.name].median
        rows.append((str(depth.blocks), f"{depth.rates[PLAIN.name]:g}", best, f"{plain:,.0f}", *cells))
    columns = ("blocks", "best rate without BN", "best without BN", "steps", *(arm.name for arm in NORMALISED))
    note = "* the rate with BN that the tuning seeds chose"
    return Table("Times fewer steps", note, columns, tuple(rows), numbers=tuple(range(len(columns))))
