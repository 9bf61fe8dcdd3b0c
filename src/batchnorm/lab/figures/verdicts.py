"""The paper's claims, and what became of them in this run."""

from __future__ import annotations

from batchnorm.records import RecordFile
from batchnorm.report.sections import Table

KINDS = {"confirmed": "good", "refuted": "bad", "inconclusive": "open", "not judged": "open"}


def draw(records: RecordFile) -> Table | None:
    """Draw one row for each claim that the run could judge.

    >>> claim = {"claim": "BN is sooner", "outcome": "confirmed", "evidence": "in 9 of 9 pairs"}
    >>> draw(RecordFile("race", {}, (), {"verdicts": [claim]})).rows
    (('BN is sooner', 'confirmed', 'in 9 of 9 pairs'),)
    """
    found = records.summary.get("verdicts", ())
    if not found:
        return None
    return Table(
        "The paper's claims, here",
        "Judged by an exact rank test over the seeds; what few seeds cannot tell is called inconclusive.",
        ("claim", "in this run", "evidence"),
        tuple((each["claim"], each["outcome"], each["evidence"]) for each in found),
        badges=KINDS,
    )
