"""How the records of all claims are drawn: a ledger by question, each row with its pictures, its card, its command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchnorm.lab.judge.claim import QUESTIONS, Judgement, deciding
from batchnorm.lab.judge.evidence import Estimate
from batchnorm.lab.judge.records import restored
from batchnorm.lab.verdict import CONFIRMED, INCONCLUSIVE, NOT_JUDGED, REFUTED
from batchnorm.records import RecordFile, typed
from batchnorm.report.sections import Entry, Interval, Ledger
from batchnorm.report.stored import from_plain

NOT_RUN = "not run"
LOOKS = {CONFIRMED: "good", REFUTED: "bad", INCONCLUSIVE: "open", NOT_RUN: "none"}
SENTENCE = (
    "Every rule was fixed before its run. Bar: the 95% interval; diamond: the value; dashed line: the threshold; "
    "shaded: what is claimed. Open a row for pictures, rule, limits and the command."
)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
FIELDS: dict[str, type] = {
    **dict.fromkeys(("name", "title", "statement", "rule", "method", "limits", "retelling", "question"), str),
    **dict.fromkeys(("command", "outcome", "sentence", "budget", "measured"), str),
    "version": int, "seeds": int, "seconds": float, "source": dict, "estimates": list, "sections": list,
}  # fmt: skip


def draw(records: RecordFile) -> Ledger:
    """Draw every claim under its question.

    >>> draw(RecordFile("lab claims", {}, (), {"claims": []}, {})).title
    '0 claims'
    """
    found = records.summary["claims"]
    for fields in found:
        fields = {**fields, "seconds": float(fields["seconds"])}
        typed(fields, FIELDS, "a claim", FIELDS)
        typed(fields["source"], dict.fromkeys(("paper", "link", "reported"), str), "a source", ("paper", "link"))
    # An outcome that is not a verdict, or a question that is none of ours, is an error, not a row of its own.
    entries = {
        question: [named(each) for each in found if each["question"] == question] for question in QUESTIONS.values()
    }
    if sum(map(len, entries.values())) < len(found):
        raise ValueError(f"a claim answers none of the questions {', '.join(entries)}")
    groups = tuple((question, tuple(own)) for question, own in entries.items() if own)
    ledger = Ledger("", SENTENCE, groups, LOOKS, "claims")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in ledger.counted())
    title = f"{len(found)} claim{'' if len(found) == 1 else 's'}{': ' if counts else ''}{counts}"
    return Ledger(title, SENTENCE, groups, LOOKS, "claims")


def named(claim: Mapping[str, Any]) -> Entry:
    """Draw one claim; what is wrong with it is reported with its name."""
    try:
        return entry(claim)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"claim {claim['name']!r:.40}: {error}") from error


def entry(claim: Mapping[str, Any]) -> Entry:
    """Draw one claim."""
    estimates = [restored(each) for each in claim["estimates"]]
    outcome = NOT_RUN if claim["outcome"] == NOT_JUDGED else claim["outcome"]
    if outcome not in LOOKS:
        raise ValueError(f"{outcome!r:.40} is not a verdict")
    shown = deciding(Judgement(claim["outcome"], "", tuple(estimates)))
    card = [("Claim", claim["statement"]), ("Rule", claim["rule"]), ("Method", claim["method"])]
    card += [("Limits", claim["limits"])]
    if claim["budget"]:
        card.append(("Measured", f"with the budget {claim['budget']}, in {lasted(claim['seconds'])} of one core"))
    source = claim["source"]
    return Entry(
        name=claim["name"],
        title=claim["title"],
        outcome=outcome,
        sentence=claim["sentence"],
        source=source["paper"],
        links=links(source["link"]),
        reported=source.get("reported", ""),
        shown=interval(shown) if shown else None,
        intervals=tuple(map(interval, estimates)),
        amounts=amounts(claim),
        command=claim["command"],
        sections=tuple(from_plain(each) for each in claim["sections"]),  # type: ignore[misc]
        card=tuple((heading, words) for heading, words in card if words),
        remark=("Retold wrongly", claim["retelling"]) if claim["retelling"] else None,
    )


def interval(estimate: Estimate) -> Interval:
    """Draw an estimate as a bar and words.

    >>> interval(Estimate("ratio", 8.0, 6.0, 9.0, threshold=2.0, unit="x")).text
    '8x (6x to 9x)'
    """
    e = estimate
    return Interval(e.what, e.value, e.low, e.high, e.threshold, e.above, e.figure, e.claimed, e.outcome)


def amounts(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """Write how many fresh seeds, and how long one core takes."""
    if not claim["budget"]:
        return ()
    seeds = claim["seeds"]
    return (*([f"{seeds} seed{'' if seeds == 1 else 's'}"] if seeds else ["no seeds"]), lasted(claim["seconds"]))


def lasted(seconds: float) -> str:
    """Write for how long the parts of a claim ran.

    >>> lasted(41.3), lasted(90.0), lasted(7200.0)
    ('41 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def links(text: str) -> tuple[tuple[str, str], ...]:
    """Return the parts of a reference, those of arXiv with their addresses.

    >>> links("arXiv:1502.03167, section 4")
    (('arXiv:1502.03167', 'https://arxiv.org/abs/1502.03167'), (', section 4', ''))
    """
    parts, end = [], 0
    for found in ARXIV.finditer(text):
        parts += [(text[end : found.start()], ""), (found[0], f"https://arxiv.org/abs/{found[1]}")]
        end = found.end()
    return tuple((words, address) for words, address in [*parts, (text[end:], "")] if words)


FIGURES = (draw,)
