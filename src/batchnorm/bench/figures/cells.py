"""The benchmark's cells: how many times torch's speed, for every shape and layout, operation and pass."""

from __future__ import annotations

from batchnorm.bench.summary import OURS, TORCH, group_cells
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text, rounded
from batchnorm.report.palette import CIVIDIS
from batchnorm.report.sections import Plot, Table, short


def draw(records: RecordFile) -> Plot | None:
    """Draw shape and layout down, operation and pass to the right, the ratio to torch as colour and as a number.

    >>> draw(RecordFile("bench", {}, ())) is None
    True
    """
    cells = [cell for cell in group_cells(records.measurements) if cell.speed(TORCH) == cell.speed(TORCH)]
    if not cells:
        return None
    places = list(dict.fromkeys(cell.place for cell in cells))
    kinds = list(dict.fromkeys(_kind(cell.setting) for cell in cells))
    speeds = {(cell.place, _kind(cell.setting)): cell.speed(TORCH) for cell in cells}
    grid = [[rounded(speeds.get((place, kind))) for kind in kinds] for place in places]
    heat = {
        "type": "heatmap",
        "x": [plotly_text(kind) for kind in kinds],
        "y": [plotly_text(place) for place in places],
        "z": grid,
        "text": [["" if value is None else f"{value:.2f}" for value in row] for row in grid],
        "texttemplate": "%{text}",
        "colorscale": CIVIDIS,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{z:.2f} times torch's speed<extra></extra>",
        "colorbar": {"thickness": 12, "title": {"text": "times"}},
    }
    return Plot(
        "Speed against torch, cell by cell",
        "How many times torch's speed our layer has (above 1 is faster), for every shape, layout, operation and pass.",
        "Heat map of speed ratios by shape and operation; the table below has the times.",
        {
            "data": [heat],
            "layout": {"xaxis": {"type": "category"}, "yaxis": {"autorange": "reversed", "automargin": True}},
        },
        height=100 + 26 * len(places) + 8 * max(map(len, kinds)),  # names of columns are written upwards
        table=Table(
            "Median times in milliseconds",
            "",
            ("cell", "pass", OURS, TORCH, "times"),
            tuple(
                (
                    cell.place,
                    _kind(cell.setting),
                    short(1e3 * cell.times[OURS].median),
                    short(1e3 * cell.times[TORCH].median),
                    f"{cell.speed(TORCH):.2f}",
                )
                for cell in cells
            ),
            numbers=(2, 3, 4),
        ),
    )


def _kind(setting: object) -> str:
    of = dict(setting)  # type: ignore[call-overload]
    kept = ", memory kept" if of.get("memory") == "kept" else ""
    return f"{of['operation']} {of['pass']}{kept}"
