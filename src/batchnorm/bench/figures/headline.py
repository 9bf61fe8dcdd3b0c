"""The first screen: how many times torch's speed, as one sentence and one bar for each kind of work."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Bar, Headline, short

VERSUS = " vs "


def draw(records: RecordFile) -> Headline | None:
    """Draw the rows that compare us with others; None if there are none.

    >>> row = {"what": "bn train vs torch", "value": 1.5, "cells": 20, "target": 1.8, "unit": "x", "detail": "worst 1x"}
    >>> draw(RecordFile("bench", {}, (), {"rows": [row]})).title
    "bn train: 1.5 times torch's speed."
    """
    rows = [row for row in records.summary.get("rows", ()) if VERSUS in row["what"] and row.get("value") is not None]
    if not rows:
        return None
    kind, _, other = rows[0]["what"].partition(VERSUS)
    bars = [
        Bar(
            row["what"].replace(VERSUS + "torch", ""),
            float(row["value"]),
            f"{short(row['value'])}x",
            "blue",
            row.get("detail", ""),
        )
        for row in rows
    ]
    return Headline(
        f"{kind}: {short(rows[0]['value'])} times {other.split(',')[0]}'s speed.",
        "How many times as long the other takes: medians of the ratios within a round, in which all take turns. The "
        "last bar is equal speed.",
        bars=(*bars, Bar("as fast", 1.0, "1x", "ink")),
        notes=tuple(records.summary.get("notes", ())),
    )
