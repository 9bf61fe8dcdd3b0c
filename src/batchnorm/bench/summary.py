"""What the cells amount to: geometric means, worst cells, multiples of the floor, each beside its target."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchnorm.bench.cases import LARGE, OPERATIONS, PASSES, Case, floor_copies
from batchnorm.bench.measure import ratio
from batchnorm.records import Measurement

OURS, TORCH, COMPILED, FLOOR = "batchnorm", "torch", "torch.compile", "floor"
OURS_COMPILED = "batchnorm.compile"
MOVED = 1.25  # times as long, from which copies in two tables were not made by the same machine
NOTABLE = 64 * 1024  # bytes from which a cell slower than torch counts; below it a call costs more than its data

SPEED_TARGETS = {
    "float32": {"bn": 1.8, "bn+relu": 2.5, "bn+add+relu": 2.5},
    "bfloat16": {"bn": 2.0, "bn+relu": 2.0, "bn+add+relu": 2.0},
}
SPEED_GOALS = {("float32", "bn+relu"): 4.0}
COMPILED_TARGET = {"float32": 3.0}
FLOOR_TARGETS = {"float32": {"contiguous": 2.0, "channels_last": 2.5}}


@dataclass(frozen=True)
class CellTimes:
    """The measurements of one cell, by contender.

    >>> cell = group_cells([Measurement("time", {"shape": "2x3", "contender": "torch"}, (1.0,), "s")])[0]
    >>> cell.setting["shape"], list(cell.times)
    ('2x3', ['torch'])
    """

    setting: Mapping[str, Any]
    times: Mapping[str, Measurement]

    def speed(self, rival: str, ours: str = OURS) -> float:
        """How many times as long the rival takes as our layer; NaN if either was not measured.

        >>> CellTimes({}, {}).speed("torch")
        nan
        """
        if ours in self.times and rival in self.times:
            return ratio(self.times[rival], self.times[ours])
        return float("nan")

    def of_floor(self) -> float:
        """How many times the floor our layer takes.

        >>> CellTimes({}, {}).of_floor()
        nan
        """
        if OURS in self.times and FLOOR in self.times:
            return ratio(self.times[OURS], self.times[FLOOR])
        return float("nan")

    @property
    def place(self) -> str:
        """Which shape and layout.

        >>> CellTimes({"shape": "2x3", "layout": "contiguous"}, {}).place
        '2x3 contiguous'
        """
        return f"{self.setting['shape']} {self.setting['layout']}"


def moved_floor(measurements: Iterable[Measurement]) -> str:
    """Say between which tables the time of the same copy moved by more than `MOVED`; nothing if it did not.

    >>> moved_floor([])
    ''

    The floor of a shape and layout is the same copy in every table (an operation and a pass). Two tables differ by the
    geometric mean of what their copies differ by, cell by cell, in either direction: opposite moves do not cancel.
    """
    tables: dict[str, dict[tuple[Any, ...], float]] = {}
    for cell in group_cells(measurements):
        setting = cell.setting
        if FLOOR not in cell.times or setting["bytes"] < NOTABLE:
            continue
        case = Case((), setting["layout"], setting["operation"], setting["pass"])
        kept = ", memory kept" if setting["memory"] == "kept" else ""
        own = tables.setdefault(f"{setting['operation']} {setting['pass']}{kept}", {})
        own[setting["shape"], setting["layout"], setting["dtype"]] = cell.times[FLOOR].median / floor_copies(case)
    moves = [
        (geometric_mean(max(a[key], b[key]) / min(a[key], b[key]) for key in both), here, there)
        for (here, a), (there, b) in itertools.combinations(tables.items(), 2)
        if (both := [key for key in a if key in b])
    ]
    most, here, there = max(moves, default=(1.0, "", ""))
    if most <= MOVED:
        return ""
    return (
        f"the floor moved between tables: the same copies differ by {most:.2f}x between {here} and {there} (at most "
        f"{MOVED:g}x is allowed), so no target is judged; run the benchmark again while nothing else runs"
    )


@dataclass(frozen=True)
class Row:
    """One line of the summary.

    >>> Row("bn train vs torch", 2.0, 10, target=1.8).reached
    True
    """

    what: str
    value: float
    cells: int
    target: float | None = None
    goal: float | None = None
    at_most: bool = False
    unit: str = "x"
    detail: str = ""
    judged: bool = True

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without a target, or where it is not judged.

        >>> Row("bn train vs torch", 1.0, 10, target=1.8).reached
        False
        """
        if self.target is None or not self.judged:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in the record file.

        >>> Row("bn train vs torch", 1.0, 10).to_json()["reached"] is None
        True
        """
        return {**asdict(self), "reached": self.reached}


def group_cells(measurements: Iterable[Measurement]) -> list[CellTimes]:
    """Gather the measurements of a run into cells, in the order in which they were taken.

    >>> group_cells([])
    []
    """
    cells: dict[tuple[tuple[str, Any], ...], dict[str, Measurement]] = {}
    for measurement in measurements:
        if measurement.quantity == "time":
            setting = tuple((key, value) for key, value in measurement.setting.items() if key != "contender")
            cells.setdefault(setting, {})[measurement.setting["contender"]] = measurement
    return [CellTimes(dict(setting), times) for setting, times in cells.items()]


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios: twice as fast and twice as slow cancel.

    >>> geometric_mean([4.0, 0.25])
    1.0
    """
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else float("nan")


def summarize(measurements: Iterable[Measurement]) -> list[Row]:
    """The summary of a run; a row without a measured cell is left out.

    >>> summarize([])
    []

    Speeds are how many times as long the other takes (more is better), multiples of the floor how many times
    as long our layer takes as moving the data must (less is better). Both come from ``measure.ratio``. No target is
    judged if the floor moved (`moved_floor`).
    """
    measurements = list(measurements)
    cells = group_cells(measurements)
    usual = [cell for cell in cells if cell.setting["memory"] == "default"] or cells
    kept = [cell for cell in cells if cell.setting["memory"] == "kept"] if usual is not cells else []
    rivals = {name: None for cell in cells for name in cell.times if name not in (OURS, TORCH, COMPILED, FLOOR)}
    rows = [
        *_speeds(usual, TORCH, PASSES, _speed_target, ""),
        *_slower_cells(usual),
        *_speeds(usual, COMPILED, PASSES, _compiled_target, ""),
        *_speeds(usual, COMPILED, PASSES, _no_target, ", both compiled", OURS_COMPILED),
        *(row for rival in rivals for row in _speeds(usual, rival, PASSES, _no_target, "")),
        *_floors(usual, ""),
        *_speeds(kept, TORCH, ("train",), _no_target, ", from 6 MB, memory kept"),
        *_floors(kept, ", memory kept"),
    ]
    return [replace(row, judged=False) for row in rows] if moved_floor(measurements) else rows


Target = Callable[[Mapping[str, Any]], tuple[float | None, float | None]]


def _speed_target(setting: Mapping[str, Any]) -> tuple[float | None, float | None]:
    if setting["pass"] != "train":
        return None, None
    dtype, operation = setting["dtype"], setting["operation"]
    return SPEED_TARGETS.get(dtype, {}).get(operation), SPEED_GOALS.get((dtype, operation))


def _compiled_target(setting: Mapping[str, Any]) -> tuple[float | None, float | None]:
    aimed = setting["pass"] == "train" and setting["operation"] == "bn+relu"
    return (COMPILED_TARGET.get(setting["dtype"]) if aimed else None), None


def _no_target(setting: Mapping[str, Any]) -> tuple[float | None, float | None]:
    return None, None


def _speeds(
    cells: Sequence[CellTimes], rival: str, passes: Sequence[str], target_of: Target, suffix: str, ours: str = OURS
) -> Iterator[Row]:
    """For each operation and pass the geometric mean over shapes and layouts, with the worst cell."""
    for pass_name in passes:
        for operation in OPERATIONS:
            speeds = [
                (cell.speed(rival, ours), cell)
                for cell in cells
                if cell.setting["operation"] == operation and cell.setting["pass"] == pass_name
            ]
            speeds = [(speed, cell) for speed, cell in speeds if speed > 0]
            if speeds:
                lowest, worst = min(speeds, key=lambda pair: pair[0])
                target, goal = target_of(worst.setting)
                yield Row(
                    f"{operation} {pass_name} vs {rival}{suffix}",
                    geometric_mean(speed for speed, _ in speeds),
                    len(speeds),
                    target,
                    goal,
                    detail=f"worst {lowest:.2f}x {worst.place}",
                )


def _slower_cells(cells: Sequence[CellTimes]) -> Iterator[Row]:
    """How many cells from 64 KB up are slower than torch, naming the three slowest."""
    speeds = [(cell.speed(TORCH), cell) for cell in cells if cell.setting["bytes"] >= NOTABLE]
    speeds = [(speed, cell) for speed, cell in speeds if speed > 0]
    if speeds:
        slower = sorted(((s, c) for s, c in speeds if s < 1), key=lambda pair: pair[0])
        lowest, worst = min(speeds, key=lambda pair: pair[0])
        named = slower[:3] or [(lowest, worst)]
        detail = "; ".join(
            f"{min(s, 0.99) if slower else s:.2f}x {c.place} {c.setting['operation']} {c.setting['pass']}"
            for s, c in named
        )
        yield Row(
            "cells from 64 KB slower than torch",
            len(slower),
            len(speeds),
            target=0,
            at_most=True,
            unit="",
            detail=("" if slower else "closest ") + detail,
        )


def _floors(cells: Sequence[CellTimes], suffix: str) -> Iterator[Row]:
    """For large tensors in training the worst multiple of the floor, by layout, with the median."""
    for layout in ("contiguous", "channels_last"):
        for operation in OPERATIONS:
            multiples = [
                (cell.of_floor(), cell)
                for cell in cells
                if cell.setting["bytes"] >= LARGE
                and cell.setting["pass"] == "train"
                and cell.setting["layout"] == layout
                and cell.setting["operation"] == operation
            ]
            multiples = [(multiple, cell) for multiple, cell in multiples if multiple > 0]
            if multiples:
                highest, worst = max(multiples, key=lambda pair: pair[0])
                middle = statistics.median(multiple for multiple, _ in multiples)
                yield Row(
                    f"{operation} train of floor, {layout}{suffix}",
                    highest,
                    len(multiples),
                    FLOOR_TARGETS.get(worst.setting["dtype"], {}).get(layout),
                    at_most=True,
                    detail=f"median {middle:.2f}x, worst {worst.setting['shape']}",
                )
