"""Findings on a terminal and in a notebook; names of modules are shown literally."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from batchnorm.doctor.catalogue import linked
from batchnorm.doctor.subject import Subject
from batchnorm.errors import printable
from batchnorm.records import HELD, SEVERITIES, Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 8  # findings of one rule, unless all are asked for
LONGEST, SENTENCE = 160, 600  # characters of a name, and of a sentence; the middle of a longer one is left out
STYLES = {"error": "bold red", "warning": "bold yellow", "advice": "bold cyan"}
COLOURS = {"error": "#c62828", "warning": "#b26a00", "advice": "#00707f"}
# Rules name missing inputs by their Python arguments; these are the options of the command line for them.
OPTIONS = {
    "example=": "--example",
    "data=": "--data",
    "optimizer=": "--optimizer",
    "before=": "--before",
}


class Shown(Protocol):
    """The part of `batchnorm.doctor.findings.Findings` that is displayed."""

    skipped: dict[str, str]
    failed: dict[str, str]
    subject: Subject | None
    rules: tuple[Any, ...]

    def __iter__(self) -> Iterator[Finding]:
        """The findings, the gravest first."""

    def counted(self) -> str:
        """How many findings of which severity there are."""

    def coverage(self, options: bool = False) -> str:
        """How many of the rules could run, and what to add for more."""


def shorten(name: str, longest: int = LONGEST) -> str:
    """Leave out the middle of a long name.

    >>> shorten("a" * 500, 20)
    'aaaaaaaaa...aaaaaaaa'
    """
    if len(name) <= longest:
        return name
    kept = longest - 3
    return f"{name[: kept - kept // 2]}...{name[len(name) - kept // 2 :]}"


def place_of(finding: Finding) -> str:
    """Return the module of a finding, for display.

    >>> place_of(Finding("BN101", "bias-before-norm", "advice", "", "its bias does nothing"))
    'the model'
    """
    return shorten(printable(finding.path)) or "the model"


def draw(
    findings: Shown, *, everything: bool = False, options: bool = False, ignored: int = 0, brief: bool = False
) -> RenderableType:
    """Draw findings for rich: by severity and rule, each with its sentence, the repair once, and a summary.

    >>> from rich import print
    >>> from batchnorm.doctor.findings import Findings
    >>> print(Findings([Finding("BN101", "bias-before-norm", "advice", "conv", "its bias does nothing")]))
    advice  BN101 bias-before-norm
      conv: its bias does nothing
    <BLANKLINE>
    1 advice

    Of each rule the first few findings are shown, or ``everything``. With ``options``, missing inputs are named
    by command-line options; ``brief`` leaves them out.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for (severity, code, name), group in groupby(findings, lambda f: (f.severity, f.code, f.name)):
        own = list(group)
        parts.append(
            Text.assemble((severity, STYLES[severity]), "  ", (code, f"bold {linked(code)}"), f" {name}", _layers(own))
        )
        shown = own if everything else own[:SHOWN]
        repairs = list(dict.fromkeys(finding.repair for finding in own))
        for finding in shown:
            parts.append(_indented((place_of(finding), "bold"), f": {_sentence(finding)}"))
            if len(repairs) > 1 and finding.repair:
                parts.append(_indented((f"{printable(finding.repair)}{_machine([finding], options)}", "dim"), by=4))
        if len(own) > len(shown):
            more = "--all shows them" if options else "print() shows them"
            parts.append(_indented((f"and {len(own) - len(shown)} more ({more})", "dim")))
        if len(repairs) == 1 and repairs[0]:
            parts.append(_indented(("repair: ", "green"), f"{printable(repairs[0])}{_machine(own, options)}"))
        parts.append(Text(""))
    parts += [
        _indented((line.strip(), "dim"), by=len(line) - len(line.lstrip()))
        for line in ([] if brief else _remarks(findings, options))
    ]
    left_out = f"; {ignored} ignored in {'its module' if ignored == 1 else 'their modules'}" if ignored else ""
    parts.append(Text.assemble((findings.counted(), "bold"), _among(findings), left_out))
    parts += [Text(line) for line in filter(None, [findings.coverage(options)])]
    return Group(*parts)


def _layers(own: list[Finding]) -> str:
    return f" ({len(own)} places)" if len(own) > 1 else ""


def _sentence(finding: Finding) -> str:
    step = "" if finding.step is None else f"step {finding.step}: "
    return step + shorten(printable(finding.sentence), SENTENCE)


def _machine(own: list[Finding], options: bool) -> str:
    """The option of the command line that repairs it."""
    kinds = {finding.fix for finding in own} - {"none"}
    if not options or not kinds:
        return ""
    return " (--fix)" if "safe" in kinds else " (--fix --unsafe-fixes)"


def _remarks(findings: Shown, options: bool) -> list[str]:
    lines = [
        f"{code} failed, which is a bug: please report it: {shorten(printable(why), 400)}"
        for code, why in findings.failed.items()
    ]
    if findings.skipped:
        lines += summarise_skipped(findings.skipped, options)
    return lines


def _among(findings: Shown) -> str:
    subject = findings.subject
    if subject is None:
        return ""
    what = "model" if subject.model is not None else "checkpoint"
    count = len(subject.norms)
    layers = f"{count or 'no'} batch normalisation layer{'' if count == 1 else 's'}"
    return f" in a {what} with {layers}"


def summarise_skipped(skipped: Mapping[str, str], options: bool = False) -> list[str]:
    """Say how many rules could not run, and which lack what, a line for each reason; and which held a result back.

    >>> skipped = {"BN201": "needs batches of data (data=)", "BN301": "needs a run", "BN302": "needs a run and luck"}
    >>> print(*summarise_skipped(skipped), sep="\\n")
    3 rules could not run:
      needs a run: BN301, BN302
      needs batches of data (data=): BN201

    If a rule lacks several inputs, the first is named; ``findings.skipped`` has all.
    """
    reasons: dict[str, list[str]] = {}
    held = [f"{code} {shorten(printable(why), 400)}" for code, why in skipped.items() if why.startswith(HELD)]
    skipped = {code: why for code, why in skipped.items() if not why.startswith(HELD)}
    for code, why in skipped.items():
        reasons.setdefault(why.partition(" and ")[0] if why.startswith("needs ") else why, []).append(code)
    lines = [f"{len(skipped)} rule{'' if len(skipped) == 1 else 's'} could not run:"] if skipped else []
    for why, codes in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {why}: {', '.join(codes)}")
    if options:
        for argument, option in OPTIONS.items():
            lines = [line.replace(f"({argument})", f"({option})") for line in lines]
    return [*lines, *held]


def _indented(*parts: str | tuple[str, str], by: int = 2) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text.assemble(*parts), (0, 0, 0, by), expand=False)


def html_table(findings: Shown) -> str:
    """Draw findings as a small table for a notebook; all text is escaped.

    >>> from batchnorm.doctor.findings import Findings
    >>> "&lt;b&gt;" in html_table(Findings([Finding("BN101", "bias-before-norm", "advice", "<b>", "does nothing")]))
    True
    """
    rows = "".join(_row(finding) for severity in SEVERITIES for finding in findings if finding.severity == severity)
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("", "rule", "where", "what", "repair"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    remarks = "".join(f"<div style='opacity:.7'>{_escaped(line)}</div>" for line in _remarks(findings, False))
    summary = f"<div><b>{_escaped(findings.counted())}</b>{_escaped(_among(findings))}</div>"
    covered = f"<div>{_escaped(findings.coverage())}</div>" if findings.rules else ""
    return f"<div>{table}{remarks}{summary}{covered}</div>"


def _row(finding: Finding) -> str:
    severity = f"<span style='color:{COLOURS[finding.severity]};font-weight:bold'>{_escaped(finding.severity)}</span>"
    rule = f"<code>{_escaped(finding.code)}</code> {_escaped(finding.name)}"
    title = _escaped(shorten(printable(", ".join(_numbers(finding.numbers))), 400))
    cells: Iterable[str] = (
        severity, rule, f"<code>{_escaped(place_of(finding))}</code>", _escaped(_sentence(finding)),
        _escaped(printable(finding.repair)),
    )  # fmt: skip
    body = "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells)
    return f'<tr title="{title}">{body}</tr>'


def _numbers(numbers: Mapping[str, object]) -> list[str]:
    return [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items()]


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
