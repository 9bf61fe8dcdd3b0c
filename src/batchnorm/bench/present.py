"""The terminal's view of a run: records in, text and tables out. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from batchnorm.bench.summary import FLOOR, TORCH, CellTimes, Row, group_cells
from batchnorm.records import Measurement, RecordFile


def heading(record: RecordFile, cells: int) -> str:
    """Where and how the figures are measured; printed before the first of them.

    >>> asked = {"dtype": "float32", "rounds": 9, "threads": 2, "torch": "2.13.0", "path": "native kernel"}
    >>> heading(RecordFile("bench", asked, ()), 4).splitlines()[0]
    'batchnorm bench: 4 cells, float32, 9 rounds of alternating contenders, 2 threads'
    """
    asked, machine = record.configuration, record.machine
    parameters = "" if asked["dtype"] == "float32" else " activations with float32 parameters, as under autocast"
    parts = [
        str(machine.get("processor", "")),
        _count(machine.get("cores"), "core"),
        str(machine.get("system", "")),
    ]
    lines = [
        f"batchnorm bench: {_count(cells, 'cell')}, {asked['dtype']}{parameters}, "
        f"{asked['rounds']} rounds of alternating contenders, {_count(asked['threads'], 'thread')}",
        f"machine: {', '.join(filter(None, parts))}; Python {machine.get('python')}, torch {asked['torch']}",
        f"batchnorm runs on: {asked['path']}",
    ]
    if asked.get("memory"):
        lines.append(f"freed memory: {asked['memory']}")
    return "\n".join(lines + [f"left out: {reason}" for reason in asked.get("left_out", ())])


def cell_tables(measurements: Iterable[Measurement]) -> Iterator[Table]:
    """One table for each operation and pass: a row per shape and layout, a column per contender.

    >>> list(cell_tables([]))
    []
    """
    groups: dict[tuple[str, str, str], list[CellTimes]] = {}
    for cell in group_cells(measurements):
        key = (cell.setting["operation"], cell.setting["pass"], cell.setting["memory"])
        groups.setdefault(key, []).append(cell)
    for (operation, pass_name, memory), cells in groups.items():
        title = f"{operation} {pass_name}" + (", memory kept" if memory == "kept" else "")
        yield _cell_table(f"{title} (ms)", cells)


def _cell_table(title: str, cells: Sequence[CellTimes]) -> Table:
    contenders = list(dict.fromkeys(name for cell in cells for name in cell.times))
    contenders.sort(key=lambda name: name == FLOOR)
    table = _table(title)
    table.add_column("shape", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for column in (*contenders, f"vs\n{TORCH}", f"of\n{FLOOR}"):
        table.add_column(column, justify="right", vertical="bottom", no_wrap=True)
    for cell in cells:
        times = [_time(cell.times.get(name)) for name in contenders]
        speed = cell.speed(TORCH)
        table.add_row(
            cell.setting["shape"],
            cell.setting["layout"],
            *times,
            Text(_factor(speed), style="red" if speed < 1 else ""),
            _factor(cell.of_floor()),
        )
    return table


def summary_table(rows: Iterable[Row]) -> Table:
    """The summary with its targets.

    >>> summary_table([Row("bn train vs torch", 2.0, 10, target=1.8)]).row_count
    1
    """
    table = _table("summary")
    table.add_column("what")
    table.add_column("cells", justify="right", no_wrap=True)
    table.add_column("result", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    table.add_column("detail")
    for row in rows:
        reached = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}[row.reached]
        if not row.judged and row.target is not None:
            reached = Text("not judged", "yellow")
        table.add_row(row.what, str(row.cells), _value(row.value, row.unit), _target(row), reached, row.detail)
    return table


def explanation() -> str:
    """How to read the tables.

    >>> explanation().splitlines()[1]
    'Times are medians; in brackets half the distance between the quartiles, in percent.'
    """
    return (
        "\nTimes are medians; in brackets half the distance between the quartiles, in percent.\n"
        "vs: how many times as long the other takes as batchnorm (in the summary the geometric mean).\n"
        "of floor: how many times the floor batchnorm takes; in the summary the worst cell from 6 MB up.\n"
        "The floor is the time to copy the tensor, 1x forward, 1.5x backward (with a residual 1.5x and 2x).\n"
        "Ratios are medians of the ratios within each round."
    )


def how_far(distances: Sequence[float | None]) -> str:
    """What the cells were measured with: how far apart the cores stood, in nanoseconds, at the beginning of each.

    >>> print(how_far([35.1, None, 171.6, 36.0]))
    Cores: a cache line took 36 ns from one to the other (35 to 172 in the course of the run).
    The longer it takes, the slower are small batches.
    >>> how_far([None])
    ''
    """
    known = sorted(distance for distance in distances if distance is not None)
    if not known:
        return ""
    course = f"{known[0]:.0f} to {known[-1]:.0f} in the course of the run"
    return (
        f"Cores: a cache line took {statistics.median(known):.0f} ns from one to the other ({course}).\n"
        "The longer it takes, the slower are small batches."
    )


def note_lines(notes: Iterable[str]) -> list[str]:
    """The notes of a run, one for each contender and kind of trouble, with how many more there were.

    >>> note_lines(["flax failed on a: x", "flax failed on b: x", "torch failed on c: y"])
    ['note: flax failed on a: x (and 1 more such cell)', 'note: torch failed on c: y']
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for note in notes:
        groups.setdefault(tuple(note.split()[:2]), []).append(note)
    return [
        f"note: {first}" + (f" (and {_count(len(more), 'more such cell')})" if more else "")
        for first, *more in groups.values()
    ]


def _table(title: str) -> Table:
    # One space between columns: with the usual three a cell does not fit into 80.
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _time(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    middle = measurement.median
    spread = 50 * (measurement.quantile(0.75) - measurement.quantile(0.25)) / middle if middle > 0 else 0.0
    return f"{_digits(1e3 * middle)} ({spread:.0f}%)"


def _digits(value: float) -> str:
    """Three significant digits, at most three places: 123, 12.3, 1.23, 0.123, 0.012; more only below 0.01."""
    places = next((n for n in (0, 1, 2, 3) if value >= 10 ** (2 - n)), 3 if value >= 0.01 else 5)
    return f"{value:.{places}f}"


def _factor(value: float) -> str:
    return f"{value:.2f}x" if value == value else ""


def _value(value: float, unit: str) -> str:
    return f"{value:.2f}{unit}" if unit else f"{value:g}"


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "<=" if row.at_most else ">="
    goal = f"\n(goal {row.goal:g}{row.unit})" if row.goal is not None else ""
    return f"{sign} {row.target:g}{row.unit}{goal}"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
