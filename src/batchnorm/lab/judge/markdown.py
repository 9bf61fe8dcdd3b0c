"""The records of all claims as Markdown: a table for each question, then a card for each claim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchnorm.lab.judge.figures import NOT_RUN, draw
from batchnorm.records import RecordFile
from batchnorm.report.sections import Entry

MARKS = {"confirmed": "✓", "refuted": "✗", "inconclusive": "?", NOT_RUN: "–"}
MACHINE = ("processor", "cores", "system", "python", "torch", "kernel")
HEAD = ("verdict", "claim", "reported by the source", "measured here", "seeds", "time on one core")


def to_markdown(records: RecordFile, pictures: str = "") -> str:
    """Return the records of ``batchnorm lab report`` as Markdown; ``pictures`` is the address of the HTML page.

    >>> print(to_markdown(RecordFile("lab claims", {}, (), {"claims": []}, {})).splitlines()[0])
    # The claims about Batch Normalization
    """
    return "\n".join(lines(records, pictures)) + "\n"


def lines(records: RecordFile, pictures: str) -> Iterator[str]:
    """Yield the lines of the page."""
    ledger, claims = draw(records), records.summary["claims"]
    yield "# The claims about Batch Normalization"
    yield ""
    yield f"**{ledger.title}.** Every rule was fixed before its run; the verdict is computed from it."
    yield ""
    yield from provenance(records.machine, claims, pictures)
    groups = [(question, tuple(entries)) for question, entries in ledger.groups]
    for question, entries in groups:
        yield from ("", f"## {question}", "", row(HEAD), row(["---"] * len(HEAD)))
        for entry in entries:
            yield row(cells(entry))
    retold = [entry for _, entries in groups for entry in entries if entry.remark]
    if retold:
        yield from ("", "## Retold wrongly", "")
        for entry in retold:
            yield f"- {link(entry)}: {plain(entry.remark[1] if entry.remark else '')}"
    for question, entries in groups:
        yield from ("", f"## The cards: {question.lower()}")
        for entry in entries:
            yield from card(entry, pictures)


def provenance(machine: Mapping[str, Any], claims: Sequence[Mapping[str, Any]], pictures: str) -> Iterator[str]:
    """Yield when and where it was measured, and the command that makes it again."""
    dates = sorted({claim["measured"] for claim in claims if claim.get("measured")})
    if dates:
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        where = ", ".join(f"{name} {machine[name]}" for name in MACHINE if machine.get(name))
        yield f"Measured {when} ({plain(where)}), by:"
    yield from ("", "```sh", "batchnorm lab run --all && batchnorm lab report", "```", "")
    yield "Figures are medians over fresh seeds with 95% bootstrap intervals."
    yield "What a source reports was not measured here."
    if pictures:
        yield from ("", f"The same with pictures: [{pictures}]({pictures}).")


def cells(entry: Entry) -> list[str]:
    """Return the row of a claim: its verdict first."""
    shown = entry.shown
    measured = f"{shown.name}: {shown.text}, claimed {shown.claimed}" if shown else entry.sentence
    seeds, *time = entry.amounts or ("",)
    words = [plain(each) for each in (entry.title, entry.reported, measured, seeds.split(" ")[0], *(time or [""]))]
    return [verdict(entry), f"{link(entry)}: {words[0]}", *words[1:]]


def card(entry: Entry, pictures: str) -> Iterator[str]:
    """Yield the card of a claim: result, estimates, rule, method, limits, command."""
    yield from ("", f"### {entry.name}", "", f"{verdict(entry)}. {plain(entry.sentence)}", "")
    yield f"- Source: {plain(entry.source)}, " + "".join(
        f"[{plain(words)}]({address})" if address else plain(words) for words, address in entry.links
    )
    for heading, words in entry.card:
        yield f"- {heading}: {plain(words)}"
    for each in entry.intervals:
        yield f"- {plain(each.name)}: {each.text}, claimed {each.claimed}: {each.outcome}"
    yield f"- Run it: `{entry.command}`"
    if pictures and entry.sections:
        yield f"- [Pictures]({pictures}#claim-{entry.name})"


def verdict(entry: Entry) -> str:
    """Return the verdict as a sign and a word."""
    return f"{MARKS[entry.outcome]} **{entry.outcome}**"


def link(entry: Entry) -> str:
    """Return the name of a claim, which leads to its card."""
    return f"[{entry.name}](#{entry.name})"


def row(cells: Sequence[str]) -> str:
    """Return one row of a table."""
    return f"| {' | '.join(cells)} |"


def plain(words: str) -> str:
    """Return words with nothing in them that Markdown or HTML would read as a sign.

    >>> plain("|z| > 2 and a*b")
    '\\\\|z\\\\| &gt; 2 and a\\\\*b'
    """
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{sign}" if sign in "|*_`[]$" else sign for sign in re.sub(r"\s+", " ", words))
