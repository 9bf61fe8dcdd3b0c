"""What a verb did to a model: every change, every place that was left alone, and how far the outputs are apart."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Table, short


def draw(records: RecordFile) -> Table | None:
    """Draw the report of ``batchnorm fold`` or ``calibrate``.

    >>> change = {"path": "bn1", "what": "folded", "before": "BatchNorm2d", "after": "into conv1"}
    >>> draw(RecordFile("fold", {}, (), {"changes": [change], "left": {"bn2": "its input is used twice"}})).rows
    (('bn1', 'folded', 'BatchNorm2d', 'into conv1'), ('bn2', 'left alone', '', 'its input is used twice'))
    """
    report = records.summary.get("report") or records.summary  # calibrate has more to say than its report
    changes, left = report.get("changes", ()), report.get("left", {})
    if not changes and not left:
        return None
    certificate = report.get("certificate") or {}
    known = {"absolute", "relative", "tolerance"} <= certificate.keys()
    return Table(
        "What was changed",
        f"Modules changed: {len({change['path'] for change in changes})}; left alone: {len(left)}.",
        ("module", "what", "before", "after, or why"),
        (
            *(tuple(str(change[name]) for name in ("path", "what", "before", "after")) for change in changes),
            *((str(path), "left alone", "", str(why)) for path, why in left.items()),
        ),
        notes=(
            f"Outputs differ by at most {short(certificate['absolute'])} ({short(certificate['relative'])} of the "
            f"largest); allowed: {short(certificate['tolerance'])} of the largest.",
        )
        if known
        else (),
    )
