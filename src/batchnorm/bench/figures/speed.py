"""The benchmark's summary: what every figure is, beside its target."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Table, short


def draw(records: RecordFile) -> Table | None:
    """Draw the summary of ``batchnorm bench``.

    >>> row = {"what": "bn train vs torch", "value": 1.5, "cells": 20, "target": 1.8, "unit": "x", "reached": False}
    >>> draw(RecordFile("bench", {}, (), {"rows": [row]})).rows
    (('bn train vs torch', '20', '1.5x', '≥ 1.8x', 'no', ''),)
    """
    rows = records.summary.get("rows", ())
    if not rows:
        return None
    asked = records.configuration
    how = ", ".join(
        f"{name} {asked[name]}" for name in ("dtype", "threads", "rounds", "torch", "path") if name in asked
    )
    return Table(
        "Speed, in short",
        "How many times as long the other takes as our layer (more is better), and how many times the floor, the time "
        "to copy the tensor, ours takes (less is better).",
        ("what", "cells", "result", "target", "reached", "detail"),
        tuple(
            (
                row["what"],
                str(row["cells"]),
                f"{short(row['value'])}{row.get('unit', '')}",
                ""
                if row.get("target") is None
                else f"{'≤' if row.get('at_most') else '≥'} {row['target']:g}{row.get('unit', '')}",
                "not judged"
                if row.get("judged") is False and row.get("target") is not None
                else {True: "yes", False: "no"}.get(row.get("reached"), ""),
                row.get("detail", ""),
            )
            for row in rows
        ),
        numbers=(1, 2, 3),
        badges={"yes": "good", "no": "bad", "not judged": "warn"},
        notes=((f"Measured with {how}.",) if how else ()) + tuple(records.summary.get("notes", ())),
    )
