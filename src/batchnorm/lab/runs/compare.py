"""Two runs or more beside each other: where they were asked for different things, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.runs.run import differing
from batchnorm.lab.runs.store import Folder
from batchnorm.records import Measurement, RecordFile

COMMAND = "lab compare"
UNNAMED = "run"


@dataclass(frozen=True)
class Comparison:
    """What is asked of runs and what they measured; ``names`` tell them apart by what differs."""

    folders: tuple[Folder, ...]
    names: tuple[str, ...]
    options: dict[str, list[Any]]
    curves: dict[str, list[dict[int, float]]]  # by quantity, for each run: the value at each step
    results: dict[str, list[float | None]]


def compare(folders: Sequence[Folder]) -> Comparison:
    """Read runs that are to be compared; they may still be running.

    >>> compare([store.find("0f3"), store.find("a71")])  # doctest: +SKIP
    """
    if len({folder.path.name for folder in folders}) < len(folders):
        raise BatchNormError("a run is named twice", do="name different ones")
    options = differing([folder.run for folder in folders])
    names = names_of(folders, options)
    lines = [folder.metrics() for folder in folders]
    quantities = dict.fromkeys(key for own in lines for line in own for key in line if key != "step")
    curves: dict[str, list[dict[int, float]]] = {
        quantity: [
            {line["step"]: float(line[quantity]) for line in own if isinstance(line.get(quantity), (int, float))}
            for own in lines
        ]
        for quantity in quantities
    }
    curves = {quantity: own for quantity, own in curves.items() if any(own)}
    found = [folder.result() if folder.finished else {} for folder in folders]
    keys = dict.fromkeys(key for result in found for key, value in result.items() if _is_number(value))
    results = {key: [r[key] if _is_number(r.get(key)) else None for r in found] for key in keys}
    return Comparison(tuple(folders), names, options, curves, results)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def names_of(folders: Sequence[Folder], options: dict[str, list[Any]]) -> tuple[str, ...]:
    """Name each run after the options in which it differs from the others."""
    return tuple(
        ", ".join(f"{key} {short(values[at])}" for key, values in options.items()) or folder.run.name or UNNAMED
        for at, folder in enumerate(folders)
    )


def short(value: Any) -> str:
    """Write a value of an option, or a figure, in a few characters.

    >>> short(0.98765432), short(None), short("digits")
    ('0.9877', '-', 'digits')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_records(comparison: Comparison) -> RecordFile:
    """Write what is compared as records, from which the page is drawn."""
    measurements = tuple(
        Measurement(quantity, {"run": name, "steps": list(own)}, tuple(own.values()))
        for quantity, runs in comparison.curves.items()
        for name, own in zip(comparison.names, runs, strict=True)
        if own
    )
    runs = [
        {"key": folder.path.name, "name": folder.run.name, "called": name, "options": dict(folder.run.options)}
        for folder, name in zip(comparison.folders, comparison.names, strict=True)
    ]
    return RecordFile(
        COMMAND,
        {"runs": runs},
        measurements,
        {"options": comparison.options, "results": comparison.results, "sentence": sentence(comparison)},
    )


def sentence(comparison: Comparison) -> str:
    """Say what the runs came to, by the quantity that comes first among accuracy, loss and any other."""
    quantities = sorted(comparison.curves, key=lambda name: ("accuracy" not in name, "loss" not in name))
    if not quantities:
        return "Nothing was measured yet."
    quantity = quantities[0]
    words = [
        f"{name}: {short(list(own.values())[-1])}"
        for name, own in zip(comparison.names, comparison.curves[quantity], strict=True)
        if own and not math.isnan(list(own.values())[-1])
    ]
    return f"{quantity.capitalize()} at the end: {'; '.join(words)}." if words else "No number was finite."
