"""Keeping a page small: of long runs, steps are left out evenly, and how many is kept with the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchnorm.records import Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.sections import thinned

MOST_NUMBERS = 140_000  # of all runs of a page; at some 7 bytes each, beside plotly's 4.8 MB, a page stays below 6 MB


def fitting(runs: Sequence[Run], most: int = MOST_NUMBERS) -> list[Run]:
    """Leave out steps of what was recorded over steps, as many as it takes.

    >>> found = tuple(Measurement("mean", {"step": step, "layer": "bn1"}, (0.0,)) for step in range(9))
    >>> (run,) = fitting([Run("a", RecordFile("watch", {}, found))], most=4)
    >>> [m.setting["step"] for m in run.records.measurements], run.records.summary["steps"]
    ([0, 3, 6, 8], {'mean': 9})
    """
    total = sum(len(m.samples) for run in runs for m in run.records.measurements if _stepped(m))
    return list(runs) if total <= most else [Run(run.name, _fewer(run.records, most / total)) for run in runs]


def _fewer(records: RecordFile, share: float) -> RecordFile:
    steps: dict[str, set[int]] = {}
    for m in records.measurements:
        if _stepped(m):
            steps.setdefault(m.quantity, set()).add(m.setting["step"])
    kept = {quantity: set(thinned(sorted(own), max(2, int(share * len(own))))) for quantity, own in steps.items()}

    def stays(m: Measurement) -> bool:
        return not _stepped(m) or m.setting["step"] in kept[m.quantity]

    recorded = {quantity: len(own) for quantity, own in steps.items()}
    return replace(
        records,
        measurements=tuple(filter(stays, records.measurements)),
        summary={**records.summary, "steps": recorded},
    )


def _stepped(measurement: Measurement) -> bool:
    """Whether it belongs to a step of a training run; the steps of a benchmark have names."""
    return type(measurement.setting.get("step")) is int
