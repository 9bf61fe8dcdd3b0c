"""Watched runs on a terminal: tables with sparklines, made from records by pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from batchnorm.observe.series import Layer, NetworkSeries, stacks
from batchnorm.present import Listing, draw, plain_console
from batchnorm.records import Measurement, RecordFile

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16
_PAST = "over time"
_LEFT = ("layer", "quantity", "values", _PAST)


def show(records: RecordFile, console: Any = None) -> None:
    """Print what a watch recorded.

    >>> show(RecordFile("watch", {}, ()))
    nothing has been recorded yet
    """
    console = console or plain_console()
    found = [listing for stack in stacks(records) for listing in tables(stack)]
    if not found:
        console.print("nothing has been recorded yet")
    for number, listing in enumerate(found):
        if number:
            console.print()
        columns = listing.columns
        console.print(draw(listing, numbers=[c for c in columns if c not in _LEFT], whole=columns[1:]))


def tables(stack: NetworkSeries) -> list[Listing]:
    """Make the tables of one network: its signals, its BN layers, its weights, and what was logged.

    >>> records = [Measurement("training loss", {"step": n, "layer": ""}, (1 / (1 + n),)) for n in range(3)]
    >>> tables(stacks(RecordFile("watch", {}, tuple(records)))[0])[0].rows
    (('training loss', '0.333', '█▃▁'),)
    """
    title = f"{stack.name}: " if stack.name else ""
    until = f"step {stack.last}" if stack.first == stack.last else f"steps {stack.first} to {stack.last}"
    made = [
        Listing(f"{title}signals, {until}", *_signals(stack.layers)),
        Listing(f"{title}batch norm", *_norms(stack.layers)),
        Listing(f"{title}weights", *_weights(stack.layers)),
        Listing(f"{title}run", ("quantity", "last", _PAST), tuple(_line(s[-1].quantity, s) for s in stack.run)),
    ]
    return [listing for listing in made if listing.rows]


def _signals(layers: Sequence[Layer]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    columns = ("layer", "values", "outside", "15 %", "50 %", "85 %", _PAST, "std", "flat or dead")
    rows = []
    for layer in layers:
        if not layer.has("histogram", "percentiles", "mean", "variance", "saturation", "dead"):
            continue
        ranks = layer.last("percentiles") or (math.nan,) * 3
        lost = layer.of("saturation") or layer.of("dead")
        variance = (layer.last("variance") or (math.nan,))[0]
        rows.append((
            layer.name,
            *(histogram_cells(layer.of("histogram")[-1]) if layer.of("histogram") else ("", "")),
            *(number(rank) for rank in ranks),
            sparkline([m.samples[1] for m in layer.of("percentiles")]),
            number(math.sqrt(variance) if variance >= 0 else math.nan),
            f"{lost[-1].samples[0]:.1%}" if lost else "",
        ))  # fmt: skip
    return columns, tuple(rows)


def _norms(layers: Sequence[Layer]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    columns = ("layer", "gamma", _PAST, "beta", _PAST, "gap: mean", _PAST, "gap: log var", _PAST)
    rows = []
    for layer in layers:
        if layer.has("gamma", "beta", "gap"):
            parts = (("gamma", 0), ("beta", 0), ("gap", 0), ("gap", 1))
            cells = [_line("", layer.of(name), part)[1:] for name, part in parts]
            rows.append((layer.name, *(cell for pair in cells for cell in pair)))
    return columns, tuple(rows)


def _weights(layers: Sequence[Layer]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    names = ("weight norm", "gradient norm", "effective learning rate")
    columns = ("layer", *(column for name in names for column in (name, _PAST)))
    rows = []
    for layer in sorted(layers, key=lambda layer: layer.place("gradient norm", "weight norm")):
        if layer.has(*names):
            cells = [_line("", layer.of(name))[1:] for name in names]
            rows.append((layer.name, *(cell for pair in cells for cell in pair)))
    return columns, tuple(rows)


def _line(name: str, series: Sequence[Measurement], part: int = 0) -> tuple[str, str, str]:
    values = [m.samples[part] for m in series]
    return name, number(values[-1]) if values else "", sparkline(values)


def sparkline(values: Iterable[float], width: int = WIDTH) -> str:
    """Draw a series in one line of at most ``width`` characters; longer ones are averaged in groups.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([0, float("nan"), 1])
    ('▁▃▆█', '▁▁', '▁ █')
    >>> len(sparkline(range(1000)))
    16
    """
    drawn = _groups(list(values), width)
    finite = [value for value in drawn if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(BARS[round((value - least) * scale)] if math.isfinite(value) else " " for value in drawn)


def histogram_cells(histogram: Measurement, width: int = WIDTH) -> tuple[str, str]:
    """Draw a histogram in one line, its bins put together into ``width``, and say which share lies outside of it.

    >>> record = Measurement("histogram", {"low": -1.0, "high": 1.0, "under": 1, "over": 1}, (0.0, 2.0, 5.0, 1.0))
    >>> histogram_cells(record)
    ('▕ ▄█▂▏', '20.0%')
    """
    setting, counts = histogram.setting, _groups(list(histogram.samples), width)
    most = max(counts, default=0.0)
    bars = "".join(BARS[math.ceil(count / most * len(BARS)) - 1] if count else " " for count in counts)
    outside = sum(setting.get(name, 0) for name in ("under", "over", "nonfinite"))
    share = f"{outside / (outside + sum(histogram.samples)):.1%}" if outside else ""
    return f"▕{bars}▏", share


def number(value: float) -> str:
    """Write a number with three digits that count; small ones, of which nothing is left at four places, as powers.

    >>> number(0.123456), number(-12345.6), number(0.00752), number(1e-7), number(float("nan"))
    ('0.123', '-1.23e+04', '0.0075', '1e-07', '?')
    """
    if not math.isfinite(value):
        return "?"
    return f"{value:.3g}" if abs(value) >= 0.1 or abs(value) < 0.001 else f"{value:.2g}"


def _groups(values: list[float], width: int) -> list[float]:
    """The means of at most ``width`` neighbouring groups."""
    if len(values) <= width:
        return values
    edges = [round(number * len(values) / width) for number in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
