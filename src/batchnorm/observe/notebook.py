"""Watched runs in a notebook: tables with small inline SVG drawings, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from batchnorm.observe.series import Layer, NetworkSeries, stacks
from batchnorm.observe.show import number
from batchnorm.records import Measurement, RecordFile

WIDE, HIGH = 160, 36
POINTS = 200  # of a line: more than it has pixels are not drawn
SIGNALS = ("values now", "15 to 85 %", "mean", "variance", "flat or dead", "gamma", "beta", "gap")
WEIGHTS = ("weight norm", "gradient norm", "effective learning rate")
_STYLE = 'style="text-align:left"'


def html(records: RecordFile) -> str:
    """Draw the records of a watch as HTML.

    >>> "&lt;b&gt;" in html(RecordFile("watch", {}, (Measurement("mean", {"step": 0, "layer": "<b>"}, (0.0,)),)))
    True
    """
    parts = [_stack(stack) for stack in stacks(records)]
    return "\n".join(parts) if parts else "<p>nothing has been recorded yet</p>"


def _stack(stack: NetworkSeries) -> str:
    until = f"step {stack.last}" if stack.first == stack.last else f"steps {stack.first} to {stack.last}"
    of = f"{stack.name}: " if stack.name else ""
    weighted = [layer for layer in stack.layers if layer.has(*WEIGHTS)]
    weighted.sort(key=lambda layer: layer.place("gradient norm", *WEIGHTS))  # which all with parameters have
    signals = _table(f"{of}signals, {until}", ("layer", *SIGNALS), [_signal(layer) for layer in stack.layers])
    weights = _table(f"{of}weights, {until}", ("layer", *WEIGHTS), [_weights(layer) for layer in weighted])
    run = _table(
        f"{of}the run", ("quantity", "over time"), [[escape(each[-1].quantity), _line(each)] for each in stack.run]
    )
    return signals + weights + run


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the rows and columns that have something in them beside a name."""
    rows = [row for row in rows if any(row[1:])]
    if not rows:
        return ""
    kept = [0, *(n for n in range(1, len(columns)) if any(row[n] for row in rows))]
    head = "".join(f"<th {_STYLE}>{columns[n]}</th>" for n in kept)
    body = "".join("<tr>" + "".join(f"<td {_STYLE}>{row[n]}</td>" for n in kept) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _signal(layer: Layer) -> list[str]:
    lost = layer.of("saturation") or layer.of("dead")
    spread = band(layer.of("percentiles"))
    return [
        escape(layer.name),
        bars(layer.of("histogram")[-1]) if layer.of("histogram") else "",
        spread,
        *("" if spread else _line(layer.of(name)) for name in ("mean", "variance")),  # which a band shows, too
        _line(lost, 0.0, 1.0),
        *(_line(layer.of(name)) for name in ("gamma", "beta", "gap")),
    ]


def _weights(layer: Layer) -> list[str]:
    return [escape(layer.name), *(_line(layer.of(name)) for name in WEIGHTS)]


def bars(histogram: Measurement) -> str:
    """Draw a histogram, with the line of zero if it is inside.

    >>> bars(Measurement("histogram", {"low": -1.0, "high": 1.0, "under": 0, "over": 0}, (1.0, 3.0))).count("<rect")
    2
    """
    low, high, counts = histogram.setting["low"], histogram.setting["high"], histogram.samples
    most, width = max(counts, default=0.0) or 1.0, WIDE / max(len(counts), 1)
    drawn = "".join(
        f'<rect x="{n * width:.1f}" y="{HIGH - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'
        for n, tall in enumerate(HIGH * count / most for count in counts)
        if tall
    )
    if low < 0 < high:
        zero = -low / (high - low) * WIDE
        drawn += f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{HIGH}" stroke="currentColor" stroke-width="0.5"/>'
    outside = sum(histogram.setting.get(name, 0) for name in ("under", "over", "nonfinite"))
    said = f"{number(low)} to {number(high)}" + (f", {outside} outside" if outside else "")
    return _svg(f'<g fill="currentColor" fill-opacity="0.6">{drawn}</g>', f"histogram, {said}") + f"<br>{said}"


def band(percentiles: Sequence[Measurement]) -> str:
    """Draw the 15th to the 85th percentile as a band over the steps, and the median as a line.

    >>> band([Measurement("percentiles", {"step": n, "layer": ""}, (-1.0, 0.0, 1.0)) for n in range(2)]).count("<path")
    2
    """
    shown = [m for m in _thin(percentiles) if all(map(math.isfinite, m.samples))]
    if not shown:
        return ""
    low, high = min(m.samples[0] for m in shown), max(m.samples[2] for m in shown)
    first, last = _steps(shown)
    outline = [_point(m, 0, first, last, low, high) for m in shown]
    outline += [_point(m, 2, first, last, low, high) for m in reversed(shown)]
    middle = [_point(m, 1, first, last, low, high) for m in shown]
    drawn = f'<path d="M{" L".join(outline)} Z" fill="currentColor" fill-opacity="0.25"/>' + _stroke(middle)
    said = ", ".join(number(sample) for sample in percentiles[-1].samples)
    return _svg(drawn, f"15th, 50th, 85th percentile, now {said}") + f"<br>{said}"


def _line(series: Sequence[Measurement], low: float | None = None, high: float | None = None) -> str:
    """Draw the first number of a series over the steps."""
    shown = [m for m in _thin(series) if math.isfinite(m.samples[0])]
    if not shown:
        return number(series[-1].samples[0]) if series else ""
    values = [m.samples[0] for m in shown]
    least, most = min(values) if low is None else low, max(values) if high is None else high
    points = [_point(m, 0, *_steps(shown), least, most) for m in shown]
    said = number(series[-1].samples[0])
    return _svg(_stroke(points), f"{series[-1].quantity}, now {said}") + f"<br>{said}"


def _thin(series: Sequence[Measurement]) -> list[Measurement]:
    if len(series) <= POINTS:
        return list(series)
    return [series[round(n * (len(series) - 1) / (POINTS - 1))] for n in range(POINTS)]


def _steps(shown: Sequence[Measurement]) -> tuple[int, int]:
    return int(shown[0].setting["step"]), int(shown[-1].setting["step"])


def _point(m: Measurement, part: int, first: int, last: int, low: float, high: float) -> str:
    x = (m.setting["step"] - first) / (last - first) * WIDE if last > first else WIDE / 2
    y = HIGH - 1 - (m.samples[part] - low) / (high - low) * (HIGH - 2) if high > low else HIGH / 2
    return f"{x:.1f} {y:.1f}"


def _stroke(points: Sequence[str]) -> str:
    if len(points) == 1:
        x, y = points[0].split()
        return f'<circle cx="{x}" cy="{y}" r="2" fill="currentColor"/>'
    return f'<path d="M{" L".join(points)}" fill="none" stroke="currentColor" stroke-width="1.5"/>'


def _svg(drawn: str, label: str) -> str:
    return (
        f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(label)}">'
        f"{drawn}</svg>"
    )
