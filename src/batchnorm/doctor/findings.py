"""The result of a check or a monitored run: findings in order, and the rules that could not run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, overload

from batchnorm.doctor.codes import chosen
from batchnorm.doctor.coverage import coverage
from batchnorm.doctor.present import draw, html_table
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.errors import BatchNormError, printable
from batchnorm.records import HELD, SEVERITIES, Finding, plain

if TYPE_CHECKING:
    from rich.console import RenderableType


class Findings(Sequence[Finding]):
    """Findings, the gravest first.

    >>> findings = Findings([Finding("BN203", "poisoned-statistics", "error", "bn1", "running_var has 1 NaN")])
    >>> len(findings), findings.codes, bool(findings.errors)
    (1, ('BN203',), True)
    >>> print(findings)
    error    bn1: BN203 poisoned-statistics: running_var has 1 NaN
    1 error

    ``skipped`` has the rules that could not run and what they lacked, and those that measured a difference and held it
    back, with the reason ("held back: ..."); ``failed`` those that broke on this model, with their error: a bug of
    ours, worth a report.
    """

    def __init__(
        self,
        found: Iterable[Finding],
        skipped: Mapping[str, str] | None = None,
        failed: Mapping[str, str] | None = None,
        subject: Subject | None = None,
        rules: Sequence[Rule] = (),
    ) -> None:
        self._found = sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.code))
        self.skipped, self.failed = dict(skipped or {}), dict(failed or {})
        self.subject, self.rules = subject, tuple(rules)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes that were found, each once.

        >>> Findings([]).codes
        ()
        """
        return tuple(dict.fromkeys(finding.code for finding in self._found))

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors.

        >>> Findings([]).errors
        []
        """
        return [finding for finding in self._found if finding.severity == "error"]

    def at_least(self, severity: str) -> list[Finding]:
        """The findings that are as grave as this severity, or graver; of ``"never"``, none.

        >>> findings = Findings([Finding("BN101", "bias-before-norm", "advice", "conv", "its bias does nothing")])
        >>> len(findings.at_least("advice")), len(findings.at_least("warning")), len(findings.at_least("never"))
        (1, 0, 0)
        """
        if severity == "never":
            return []
        if severity not in SEVERITIES:
            raise BatchNormError(
                f"{severity!r} is not a severity", do=f"give one of {', '.join(SEVERITIES)}, or never to let all pass"
            )
        grave = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return [finding for finding in self._found if finding.severity in grave]

    def without(self, ignored: Mapping[str, Sequence[str]]) -> Findings:
        """Leave out the rules that are ignored in some modules: patterns of paths, and the codes or names for each.

        >>> bias = Finding("BN101", "bias-before-norm", "advice", "backbone.conv", "its bias does nothing")
        >>> len(Findings([bias]).without({"backbone.*": ["BN101"]})), len(Findings([bias]).without({"head": ["BN1"]}))
        (0, 1)
        """
        codes = {pattern: chosen(words) if words else {} for pattern, words in ignored.items()}

        def kept(finding: Finding) -> bool:
            return not any(finding.code in of and fnmatchcase(finding.path, pattern) for pattern, of in codes.items())

        return Findings(filter(kept, self._found), self.skipped, self.failed, self.subject, self.rules)

    def to_json(self) -> str:
        """Serialise the findings, and which rules could not run.

        >>> json.loads(Findings([], {"BN201": "needs data"}).to_json())["skipped"]
        {'BN201': 'needs data'}
        """
        return json.dumps(self.content(), indent=1, allow_nan=False, default=str)

    def content(self) -> dict[str, Any]:
        """What `to_json` writes, as plain dictionaries and lists.

        >>> sorted(Findings([]).content())
        ['failed', 'findings', 'skipped']
        """
        found = [asdict(finding) for finding in self._found]
        held: dict[str, Any] = plain({"findings": found, "skipped": self.skipped, "failed": self.failed})
        return held

    def __str__(self) -> str:
        lines = [f"{finding.severity:<8} {printable(str(finding))}" for finding in self._found]
        lines += [f"{code} failed here: {printable(why)}" for code, why in self.failed.items()]
        return "\n".join([*lines, self.counted(), *filter(None, [self.coverage()])])

    def counted(self) -> str:
        """Say how many findings of which severity there are.

        >>> Findings([]).counted()
        'nothing found'
        """
        counts = [(s, sum(f.severity == s for f in self._found)) for s in SEVERITIES]
        words = [f"{n} {s}{'s' if n > 1 and s != 'advice' else ''}" for s, n in counts if n]
        return ", ".join(words) or "nothing found"

    def coverage(self, options: bool = False) -> str:
        """Say how many of the rules could run, and what to add for more; nothing if all could.

        >>> Findings([]).coverage()
        ''
        """
        idle = {code for code, why in self.skipped.items() if not why.startswith(HELD)} | set(self.failed)
        return coverage(self.rules, idle, self.subject, options)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> list[Finding]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __repr__(self) -> str:
        return f"<Findings: {self.counted()}>"

    def __rich__(self) -> RenderableType:
        return draw(self)

    def _repr_html_(self) -> str:
        return html_table(self)
