"""What was logged of a run as a whole, over its steps: losses, accuracies, anything given to ``watch.log``."""

from __future__ import annotations

from typing import Any

from batchnorm.observe.figures.looks import COLORS
from batchnorm.records import RecordFile
from batchnorm.report.embed import plotly_text, rounded
from batchnorm.report.palette import DASHES, look_of
from batchnorm.report.sections import Plot, Table, short, thinned

MOST_ROWS = 40  # of the table beside the lines


def draw(records: RecordFile) -> Plot | None:
    """Draw one line for each quantity and stack; the film draws the losses itself.

    >>> draw(RecordFile("watch", {}, ())) is None
    True
    """
    lines: dict[str, dict[int, float]] = {}
    stacks: dict[str, str] = {}
    logged = []
    moving = any(m.quantity == "histogram" for m in records.measurements)
    for m in records.measurements:
        if m.setting.get("layer", "") or "step" not in m.setting or not m.samples:
            continue
        if moving and m.quantity == "training loss":
            continue
        logged.append(m)
    quantities = list(dict.fromkeys(m.quantity for m in logged))
    alone = len(quantities) == 1  # then the axis has its name
    for m in logged:
        name = ", ".join(str(part) for part in (m.setting.get("stack"), m.quantity) if part)
        name = str(m.setting.get("stack") or name) if alone else name
        stacks[name] = str(m.setting.get("stack", ""))
        lines.setdefault(name, {})[int(m.setting["step"])] = m.samples[0]
    if not lines:
        return None
    share = all(word.endswith("accuracy") for word in quantities)
    traces: list[dict[str, Any]] = []
    for number, (name, values) in enumerate(lines.items()):
        colour, dash = look_of(number)
        if stacks[name] in COLORS:  # as in the film; a dash for each quantity
            colour, dash = (
                COLORS[stacks[name]],
                DASHES[list(stacks.values())[:number].count(stacks[name]) % len(DASHES)],
            )
        steps = sorted(values)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plotly_text(name),
                "x": steps,
                "y": [rounded(values[step]) for step in steps],
                "line": {"dash": dash, "width": 2},
                "meta": {"colour": colour, "part": "line"},
            }
        )
    return Plot(
        "The run as a whole",
        "What was logged besides the layers, over the steps.",
        f"Line chart over training steps of {', '.join(lines)}; the table below has the numbers.",
        {
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "training steps"}},
                "yaxis": {
                    **({"title": {"text": plotly_text(quantities[0])}} if alone else {}),
                    **({"tickformat": ".0%"} if share else {}),
                },
            },
        },
        table=numbers(lines),
    )


def numbers(lines: dict[str, dict[int, float]]) -> Table:
    """The same lines as a table: a row for each step, of many steps some.

    >>> numbers({"loss": {0: 2.5, 4: 0.125}, "accuracy": {4: 0.9}}).rows
    (('0', '2.5', '–'), ('4', '0.125', '0.9'))
    """
    every = sorted({step for values in lines.values() for step in values})
    steps = thinned(every, MOST_ROWS)
    title = "Logged values" if len(steps) == len(every) else f"Logged values, at {len(steps)} of the {len(every)} steps"
    rows = tuple((str(step), *(short(values.get(step)) for values in lines.values())) for step in steps)
    return Table(title, "", ("step", *lines), rows, numbers=tuple(range(len(lines) + 1)))
