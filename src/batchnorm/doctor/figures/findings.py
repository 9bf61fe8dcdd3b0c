"""What the doctor found, the gravest first."""

from __future__ import annotations

from collections.abc import Mapping

from batchnorm.records import HELD, SEVERITIES, RecordFile
from batchnorm.report.sections import Table, short

KINDS = {"error": "bad", "warning": "warn", "advice": "open"}


def draw(records: RecordFile) -> Table:
    """Draw a row for each finding, with the numbers that show it and what to do.

    >>> draw(RecordFile("check", {}, (), {"findings": []})).title
    'Nothing was found.'
    """
    found = sorted(
        records.summary.get("findings", ()),
        key=lambda f: SEVERITIES.index(f["severity"]) if f["severity"] in SEVERITIES else len(SEVERITIES),
    )
    counts = [(severity, sum(f["severity"] == severity for f in found)) for severity in SEVERITIES]
    said = ", ".join(f"{n} {word}{'s' * (n > 1 and word != 'advice')}" for word, n in counts if n)
    lacking = [
        f"{codes} ({why.removeprefix('needs ')})"
        for why, codes in together(records.summary.get("skipped", {}))
        if not why.startswith(HELD)
    ]
    return Table(
        f"Found: {said}." if found else "Nothing was found.",
        f"The gravest is of {found[0]['path'] or 'the model'}: {found[0]['sentence']}." if found else "",
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
            *([f"Rules that could not run, and what they need: {'; '.join(lacking)}."] if lacking else []),
            *(f"{codes} {why}." for why, codes in together(records.summary.get("skipped", {})) if why.startswith(HELD)),
            *(f"{code} failed here: {why}" for code, why in records.summary.get("failed", {}).items()),
        ),
    )


def together(skipped: Mapping[str, str]) -> list[tuple[str, str]]:
    """Name the rules that lack the same thing together.

    >>> together({"BN204": "needs data", "BN301": "needs a run", "BN302": "needs a run"})
    [('needs data', 'BN204'), ('needs a run', 'BN301, BN302')]
    """
    found: dict[str, list[str]] = {}
    for code, why in skipped.items():
        found.setdefault(why, []).append(code)
    return [(why, ", ".join(codes)) for why, codes in found.items()]


def _number(value: object) -> str:
    return short(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
