"""The definition of a rule: code, name, inputs, check and repair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchnorm.doctor.needs import NEEDS
from batchnorm.records import SEVERITIES, Finding, Report

if TYPE_CHECKING:
    from batchnorm.doctor.repair import Repair
    from batchnorm.doctor.subject import Subject
    from batchnorm.doctor.watcher import Watcher

SAFETIES = ("safe", "unsafe", "none")

Look = Callable[["Subject"], Iterable[Finding]]
Fix = Callable[["Repair", Sequence[Finding]], Report]


@dataclass(frozen=True)
class Rule:
    """A bug that the doctor can detect.

    >>> from batchnorm.doctor.codes import RULES
    >>> RULES["BN101"].name, RULES["BN101"].safety
    ('bias-before-norm', 'safe')

    ``page`` is the docstring of the rule's file. ``look`` yields findings about a `Subject` that has all of ``needs``;
    ``watch`` makes the object that receives the events of a training run. ``fix`` changes the model of a `Repair`:
    ``safety`` says whether that happens without being asked for, and ``keeps`` whether the function in evaluation
    mode stays the same.
    """

    code: str
    name: str
    severity: str
    page: str
    look: Look | None = None
    needs: tuple[str, ...] = ("model",)
    watch: Callable[[], Watcher] | None = None
    fix: Fix | None = None
    safety: str = "none"
    keeps: bool = True

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.code
        assert self.safety in SAFETIES, self.code
        assert set(self.needs) <= set(NEEDS), self.code
        assert (self.fix is None) == (self.safety == "none"), self.code
        assert self.look is not None or self.watch is not None, self.code

    @property
    def title(self) -> str:
        """The first line of the page.

        >>> from batchnorm.doctor.codes import RULES
        >>> RULES["BN101"].title
        'A bias in front of batch normalisation, which cancels it.'
        """
        return self.page.strip().splitlines()[0]

    def found(
        self,
        path: str,
        sentence: str,
        repair: str,
        *,
        severity: str | None = None,
        fix: str | None = None,
        step: int | None = None,
        **numbers: Any,
    ) -> Finding:
        """Make a finding of this rule; its numbers are plain ones (float, int, str, lists of them).

        >>> from batchnorm.doctor.codes import RULES
        >>> RULES["BN101"].found("conv", "its bias does nothing", "drop it", channels=8).numbers
        {'channels': 8}
        """
        assert severity is None or severity in SEVERITIES
        return Finding(
            self.code, self.name, severity or self.severity, path, sentence, numbers, repair, fix or self.safety, step
        )
