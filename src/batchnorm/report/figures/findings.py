"""What the doctor found, the gravest first."""

from __future__ import annotations

from batchnorm.records import SEVERITIES, RecordFile
from batchnorm.report.sections import Table, short

KINDS = {"error": "bad", "warning": "warn", "advice": "open"}


def draw(records: RecordFile) -> Table:
    """Draw a row for each finding, with the numbers that show it and what to do.

    >>> draw(RecordFile("check", {}, (), {"findings": []})).sentence
    'Nothing was found.'
    """
    found = sorted(
        records.summary.get("findings", ()),
        key=lambda f: SEVERITIES.index(f["severity"]) if f["severity"] in SEVERITIES else len(SEVERITIES),
    )
    counts = [(severity, sum(f["severity"] == severity for f in found)) for severity in SEVERITIES]
    said = ", ".join(f"{n} {word}{'s' * (n > 1 and word != 'advice')}" for word, n in counts if n)
    return Table(
        "What the doctor found",
        f"Found: {said}; the gravest first." if found else "Nothing was found.",
        ("severity", "rule", "module", "what was found", "the numbers", "what to do"),
        tuple(
            (
                f["severity"],
                f"{f['code']} {f['name']}",
                f["path"] or "the model",
                f["sentence"],
                ", ".join(f"{key} {_number(value)}" for key, value in (f.get("numbers") or {}).items()),
                f.get("repair") or "",
            )
            for f in found
        ),
        badges=KINDS,
        notes=(
            *(f"{code} could not look: it {why}." for code, why in records.summary.get("skipped", {}).items()),
            *(f"{code} failed here: {why}" for code, why in records.summary.get("failed", {}).items()),
        ),
    )


def _number(value: object) -> str:
    return short(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
