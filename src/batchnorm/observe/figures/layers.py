"""Every watched quantity as a map: layers down, steps to the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchnorm.records import Measurement, RecordFile
from batchnorm.report.embed import plotly_text, rounded
from batchnorm.report.palette import BLUE_TO_ORANGE, CIVIDIS
from batchnorm.report.sections import Choice, Plot, Table, short

DRAWN_ELSEWHERE = ("histogram",)
SIGNED = ("mean", "percentiles", "beta")  # colours that part at 0
WHICH = {"percentiles": 1}  # the sample that a map shows, where it is not the first
FIRST = "saturation"  # where there is one: what the film is about
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
    watched = dict(sorted(watched.items(), key=lambda item: item[0] != FIRST))
    choices = tuple(Choice(WORDS.get(quantity, quantity), heat(quantity, found)) for quantity, found in watched.items())
    rows = max(len(choice.figure["data"][0]["y"]) for choice in choices)
    return Plot(
        "Every layer over the steps",
        "Choose a quantity: a row for each layer, steps to the right, the value as colour.",
        "Heat map of the chosen quantity, a row for each layer, training steps to the right; the table below has "
        "every quantity at the last step.",
        choices[0].figure,
        height=130 + 26 * min(rows, 40),
        choices=choices,
        table=at_the_end(watched),
    )


def at_the_end(watched: Mapping[str, Iterable[Measurement]]) -> Table:
    """Every quantity of every layer, where it was last recorded.

    >>> at_the_end({"mean": [Measurement("mean", {"step": step, "layer": "bn1"}, (step,)) for step in (0, 4)]}).rows
    (('bn1', '4'),)
    """
    last: dict[str, dict[str, float]] = {}
    for quantity, measurements in watched.items():
        for m in sorted(measurements, key=lambda m: int(m.setting["step"])):
            last.setdefault(name_of(m), {})[quantity] = m.samples[which(m)]
    rows = tuple((name, *(short(row.get(quantity)) for quantity in watched)) for name, row in last.items())
    columns = ("layer", *(WORDS.get(quantity, quantity) for quantity in watched))
    return Table("Every layer, when last recorded", "", columns, rows, numbers=tuple(range(1, len(columns))))


def heat(quantity: str, measurements: Iterable[Measurement]) -> dict[str, Any]:
    """The map of one quantity.

    >>> heat("mean", [Measurement("mean", {"step": 4, "layer": "bn1"}, (0.5,))])["data"][0]["z"]
    [[0.5]]
    """
    found: dict[str, dict[int, float | None]] = {}
    for m in measurements:
        found.setdefault(name_of(m), {})[int(m.setting["step"])] = rounded(m.samples[which(m)], 4)
    steps = sorted({step for row in found.values() for step in row})
    trace = {
        "type": "heatmap",
        "x": steps,
        "y": [plotly_text(name) for name in found],
        "z": [[row.get(step) for step in steps] for row in found.values()],
        "hoverongaps": False,
        "hovertemplate": "%{y}, step %{x}: %{z:.4g}<extra></extra>",
        "colorbar": {"thickness": 12, "title": {"text": plotly_text(WORDS.get(quantity, quantity))}},
        **({"colorscale": BLUE_TO_ORANGE, "zmid": 0} if quantity in SIGNED else {"colorscale": CIVIDIS}),
    }
    return {
        "data": [trace],
        "layout": {
            "xaxis": {"title": {"text": "training steps"}},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        },
    }


def which(measurement: Measurement) -> int:
    """The sample that stands for a measurement of several.

    >>> which(Measurement("percentiles", {}, (-1.0, 0.0, 1.0)))
    1
    """
    return min(WHICH.get(measurement.quantity, 0), len(measurement.samples) - 1)


def name_of(measurement: Measurement) -> str:
    """The row of a measurement: its layer, and the stack if there is one.

    >>> name_of(Measurement("mean", {"layer": "layer 1", "stack": "with BN", "step": 0}, (0.0,)))
    'with BN, layer 1'
    """
    return ", ".join(str(part) for part in (measurement.setting.get("stack"), measurement.setting["layer"]) if part)
