"""Every watched quantity as a map: layers down, steps to the right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchnorm.records import Measurement, RecordFile
from batchnorm.report.embed import plotly_text, rounded
from batchnorm.report.sections import Choice, Plot

DRAWN_ELSEWHERE = ("histogram",)
SIGNED = ("mean", "beta")  # colours that part at 0
WHICH = {"percentiles": 1}  # the sample that a map shows, where it is not the first
WORDS = {"percentiles": "median", "gamma": "gamma (mean)", "beta": "beta (mean)", "gap": "gap of the means"}


def draw(records: RecordFile) -> Plot | None:
    """Draw one map a quantity, of which the page shows one at a time.

    >>> draw(RecordFile("watch", {}, ())) is None
    True
    >>> records = RecordFile("watch", {}, (Measurement("mean", {"step": 4, "layer": "bn1"}, (0.5,)),))
    >>> [choice.name for choice in draw(records).choices]
    ['mean']
    """
    watched: dict[str, list[Measurement]] = {}
    for m in records.measurements:
        if m.setting.get("layer") and "step" in m.setting and m.quantity not in DRAWN_ELSEWHERE and m.samples:
            watched.setdefault(m.quantity, []).append(m)
    if not watched:
        return None
    choices = tuple(Choice(WORDS.get(quantity, quantity), heat(quantity, found)) for quantity, found in watched.items())
    rows = max(len(choice.figure["data"][0]["y"]) for choice in choices)
    return Plot(
        "Every layer over the steps",
        "Choose a quantity: a row for each layer, steps to the right, the value as colour.",
        "Heat map of the chosen quantity, a row for each layer, training steps to the right.",
        choices[0].figure,
        height=130 + 26 * min(rows, 40),
        choices=choices,
    )


def heat(quantity: str, measurements: Iterable[Measurement]) -> dict[str, Any]:
    """The map of one quantity.

    >>> heat("mean", [Measurement("mean", {"step": 4, "layer": "bn1"}, (0.5,))])["data"][0]["z"]
    [[0.5]]
    """
    found: dict[str, dict[int, float | None]] = {}
    for m in measurements:
        which = min(WHICH.get(quantity, 0), len(m.samples) - 1)
        found.setdefault(name_of(m), {})[int(m.setting["step"])] = rounded(m.samples[which], 4)
    steps = sorted({step for row in found.values() for step in row})
    trace = {
        "type": "heatmap",
        "x": steps,
        "y": [plotly_text(name) for name in found],
        "z": [[row.get(step) for step in steps] for row in found.values()],
        "hoverongaps": False,
        "hovertemplate": "%{y}, step %{x}: %{z:.4g}<extra></extra>",
        "colorbar": {"thickness": 12, "title": {"text": plotly_text(WORDS.get(quantity, quantity))}},
        **(
            {"colorscale": "RdBu", "zmid": 0, "reversescale": True} if quantity in SIGNED else {"colorscale": "Cividis"}
        ),
    }
    return {
        "data": [trace],
        "layout": {
            "xaxis": {"title": {"text": "training steps"}},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        },
    }


def name_of(measurement: Measurement) -> str:
    """The row of a measurement: its layer, and the stack if there is one.

    >>> name_of(Measurement("mean", {"layer": "layer 1", "stack": "with BN", "step": 0}, (0.0,)))
    'with BN, layer 1'
    """
    return ", ".join(str(part) for part in (measurement.setting.get("stack"), measurement.setting["layer"]) if part)
