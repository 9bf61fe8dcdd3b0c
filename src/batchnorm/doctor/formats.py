"""Findings as text, JSON, SARIF 2.1.0, or annotations of GitHub's workflows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from batchnorm import __version__
from batchnorm.doctor.codes import RULES
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.present import draw, place_of, shorten
from batchnorm.errors import printable
from batchnorm.progress import QUIET, level
from batchnorm.records import Finding, Report, plain

FORMAT = 1  # of the JSON
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "advice": "note"}
ANNOTATIONS = {"error": "error", "warning": "warning", "advice": "notice"}


@dataclass(frozen=True)
class Outcome:
    """The result of a command: the subject, the findings and the repairs.

    ``file`` and ``line`` are where the model is written, or the checkpoint, if that is known. ``ignored`` counts the
    findings that were left out because they are ignored in their modules. ``everything`` is for the eye only.
    """

    subject: str
    findings: Findings
    report: Report | None = None
    file: str = ""
    line: int | None = None
    ignored: int = 0
    everything: bool = False


def as_text(outcome: Outcome, *, width: int | None = None, colour: bool = False) -> str:
    """Write findings as text for people; without a width, every sentence is one line.

    >>> from batchnorm.doctor.findings import Findings
    >>> print(as_text(Outcome("model.pt", Findings([]))))
    nothing found
    """
    from rich.console import Console

    stream = StringIO()
    console = Console(
        file=stream, width=width or 100_000, force_terminal=colour, no_color=not colour, highlight=False, markup=False,
        emoji=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    parts: list[Any] = [
        draw(
            outcome.findings,
            everything=outcome.everything,
            options=True,
            ignored=outcome.ignored,
            brief=level() == QUIET,
        ),
    ]
    if outcome.report is not None:
        parts = [outcome.report, "", *parts]
    console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def as_json(outcome: Outcome) -> str:
    """Write findings, skipped rules and repairs as JSON.

    >>> from batchnorm.doctor.findings import Findings
    >>> json.loads(as_json(Outcome("model.pt", Findings([]))))["subject"]
    'model.pt'
    """
    content = {
        "format": FORMAT,
        "batchnorm": __version__,
        "subject": outcome.subject,
        **outcome.findings.content(),
        "ignored": outcome.ignored,
        "fixed": None if outcome.report is None else plain(asdict(outcome.report)),
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str)


def as_sarif(outcome: Outcome) -> str:
    """Write findings as a SARIF 2.1.0 log, which code scanning services and editors read.

    >>> from batchnorm.doctor.findings import Findings
    >>> json.loads(as_sarif(Outcome("model.pt", Findings([]))))["version"]
    '2.1.0'
    """
    places = {code: index for index, code in enumerate(RULES)}
    notifications = [
        {
            "level": "error",
            "associatedRule": {"id": code},
            "message": {"text": _unlinked(f"{code} could not run: {why}")},
        }
        for code, why in outcome.findings.failed.items()
    ]
    driver = {
        "name": "batchnorm",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_descriptor(rule) for rule in RULES.values()],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not notifications, "toolExecutionNotifications": notifications}],
        "results": [_result(finding, places, outcome) for finding in outcome.findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False)


def _descriptor(rule: Any) -> dict[str, Any]:
    body = rule.page.strip()
    return {
        "id": rule.code,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": _unlinked(rule.title)},
        "fullDescription": {"text": _unlinked(rule.title)},
        "help": {"text": _unlinked(body), "markdown": f"# {rule.code} {rule.name}\n\n{body}"},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
        "properties": {"tags": ["batch-normalization"], "fix": rule.safety, "needs": list(rule.needs)},
    }


def _result(finding: Finding, places: dict[str, int], outcome: Outcome) -> dict[str, Any]:
    where: dict[str, Any] = {
        "logicalLocations": [
            {
                "name": finding.path.rpartition(".")[2] or "the model",
                "fullyQualifiedName": finding.path or "the model",
                "kind": "module",
            }
        ]
    }
    if outcome.file:
        physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(outcome.file)}}
        if outcome.line is not None:
            physical["region"] = {"startLine": outcome.line}
        where["physicalLocation"] = physical
    repair = f"; {finding.repair}" if finding.repair else ""
    place = {"ruleIndex": places[finding.code]} if finding.code in places else {}
    mark = hashlib.sha256(f"{finding.code}\0{finding.path}".encode("utf-8", "surrogatepass")).hexdigest()
    return {
        "ruleId": finding.code,
        **place,
        "level": LEVELS[finding.severity],
        "message": {"text": _unlinked(f"{finding.path or 'the model'}: {finding.sentence}{repair}")},
        "locations": [where],
        "partialFingerprints": {"batchnorm/v1": mark},
        "properties": {"fix": finding.fix, "numbers": plain(finding.numbers)},
    }


def _unlinked(text: str) -> str:
    """Text in which SARIF sees no link, whatever a module is called."""
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]") if "](" in text else text


def _uri(file: str) -> str:
    """A file as a URI: relative to the current folder if it is inside, so that it fits the repository of the user."""
    path = Path(file).resolve()
    try:
        inside = path.relative_to(Path.cwd().resolve())
    except ValueError:
        return path.as_uri()
    from urllib.parse import quote

    return quote(inside.as_posix())


def as_github(outcome: Outcome) -> str:
    """Write findings as workflow commands, which GitHub shows beside the code.

    >>> from batchnorm.doctor.findings import Findings
    >>> finding = Finding("BN101", "bias-before-norm", "advice", "conv", "its bias does nothing", repair="bias=False")
    >>> print(as_github(Outcome("net.py:make", Findings([finding]), file="net.py", line=3)))
    ::notice file=net.py,line=3,title=BN101 bias-before-norm::conv: its bias does nothing; bias=False
    """
    lines = []
    for finding in outcome.findings:
        properties = {"title": f"{finding.code} {finding.name}"}
        if outcome.file:
            line = {} if outcome.line is None else {"line": str(outcome.line)}
            properties = {"file": os.path.relpath(outcome.file), **line, **properties}
        repair = f"; {printable(finding.repair)}" if finding.repair else ""
        message = f"{place_of(finding)}: {shorten(printable(finding.sentence), 2000)}{repair}"
        listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
        lines.append(f"::{ANNOTATIONS[finding.severity]} {listed}::{_data(message)}")
    return "\n".join(lines)


def _data(text: str) -> str:
    shown = "".join(c if c in "\r\n" else printable(c) for c in text)
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


FORMATS: dict[str, Callable[[Outcome], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
