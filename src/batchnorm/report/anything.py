"""Records that have no figure of their own: every measurement as a row."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Table, short

MOST_ROWS = 500


def draw(records: RecordFile) -> Table:
    """Draw what was measured, in which setting, the middle and the ends of the samples.

    >>> from batchnorm.records import Measurement
    >>> draw(RecordFile("calibrate", {}, (Measurement("time", {"layer": "bn1"}, (1.0, 3.0, 2.0), "ms"),))).rows
    (('time', 'layer bn1', '3', '2', '1', '3', 'ms'),)
    """
    found = records.measurements
    rows = tuple(
        (
            m.quantity,
            ", ".join(f"{key} {value}" for key, value in m.setting.items()),
            str(len(m.samples)),
            short(m.median),
            short(min(m.samples, default=None)),
            short(max(m.samples, default=None)),
            m.unit,
        )
        for m in found[:MOST_ROWS]
    )
    more = f"Shown are the first {MOST_ROWS} of {len(found)} measurements."
    return Table(
        f"Records of {records.command}",
        "Every measurement: what, in which setting, how many samples, and their median and ends.",
        ("quantity", "setting", "samples", "median", "least", "most", "unit"),
        rows,
        numbers=(2, 3, 4, 5),
        notes=(more,) if len(found) > MOST_ROWS else (),
    )
