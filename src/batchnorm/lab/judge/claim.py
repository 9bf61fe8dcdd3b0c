"""What a claim is: a sentence that could be false, how it is tested, and the rule that judges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.judge.evidence import Estimate, verdict_of
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.verdict import NOT_JUDGED
from batchnorm.report.sections import Section

EXPERIMENT = "claim"
BUDGETS = ("quick", "full")
QUESTIONS = {
    "works": "Does it work?",
    "why": "Why?",
    "costs": "What does it cost?",
    "replaces": "What replaces it?",
}


@dataclass(frozen=True)
class Source:
    """Where a claim comes from, and what was reported there; never a figure of ours."""

    paper: str  # "Ioffe & Szegedy 2015, section 4.2"
    link: str  # "arXiv:1502.03167"
    reported: str = ""  # "14.8 times fewer steps on ImageNet, BN-x5"


@dataclass(frozen=True)
class Part:
    """One part of a claim's protocol, which is one run: what was asked, and what came of it."""

    options: Mapping[str, Any]
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """What became of a claim: one verdict from one or several estimates, and a sentence with the figures."""

    outcome: str
    sentence: str
    estimates: tuple[Estimate, ...] = ()
    seeds: int = 0


def judged(sentence: str, estimates: Sequence[Estimate], seeds: int = 0) -> Judgement:
    """Judge by intervals against thresholds: every one has to hold, and one that fails refutes.

    >>> judged("8 times", [Estimate("ratio", 8.0, 6.0, 9.0, threshold=2.0)]).outcome
    'confirmed'
    """
    return Judgement(verdict_of(estimates), sentence, tuple(estimates), seeds)


@dataclass(frozen=True)
class Claim:
    """One claim; its file in ``lab/claims/`` makes one of these and calls it ``CLAIM``.

    ``parts`` returns the options of each part for a budget; ``measure`` carries out one part and returns JSON-able
    results; ``judge`` and ``draw`` see all parts with their results. ``rule`` says in words what ``judge`` does.
    """

    name: str
    question: str  # a key of QUESTIONS
    title: str  # the claim in about ten words
    statement: str  # in one sentence that could be false
    source: Source
    rule: str
    parts: Callable[[str], list[dict[str, Any]]]
    measure: Callable[[Mapping[str, Any], Recorder], Mapping[str, Any]]
    judge: Callable[[Sequence[Part]], Judgement]
    draw: Callable[[Sequence[Part]], Sequence[Section]]
    method: str  # of the card: arms, sweeps, seeds, data
    limits: str  # of the card: what the experiment cannot show
    retelling: str = ""  # a popular retelling that is wrong, and what is right
    version: int = 1  # raise it when the protocol changes: its runs are made anew
    command: str = ""  # what carries it out where it has no parts, because it takes a cluster

    @property
    def how_to_run(self) -> str:
        """Return the command that carries out the claim."""
        return self.command or f"batchnorm lab run {self.name}"

    def runs(self, budget: str) -> list[LabRun]:
        """Return the runs that a budget asks for; parts that two budgets share are the same runs."""
        about = {"claim": self.name, "version": self.version}
        return [
            LabRun(EXPERIMENT, {**about, **part}, " ".join([self.name, *_words(part)])) for part in self.parts(budget)
        ]


def not_run(claim: Claim) -> Judgement:
    """Return what is known of a claim before all of its parts are finished."""
    return Judgement(NOT_JUDGED, "It is run apart from the others." if claim.command else "It was not run yet.")


def listed(*, command: str, **card: Any) -> Claim:
    """Return a claim that is listed with its command, and never judged here: it has no parts.

    >>> listed(
    ...     command="batchnorm lab run big", name="big", question="works", title="A claim", statement="It holds.",
    ...     source=Source("", ""), rule="", method="", limits="",
    ... ).runs("full")
    []
    """

    def measure(options: Mapping[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        raise BatchNormError(f"the claim {card['name']} has no parts to measure", do=f"run it with: {command}")

    return Claim(
        parts=lambda budget: [],
        measure=measure,
        judge=lambda parts: judged("It has no parts.", []),
        draw=lambda parts: [],
        command=command,
        **card,
    )


def deciding(judgement: Judgement) -> Estimate | None:
    """Return the estimate that decides: the first one with the outcome of the whole.

    >>> kept, broken = Estimate("a", 2, 1.5, 3, threshold=1), Estimate("b", 0.2, 0.1, 0.3, threshold=1)
    >>> deciding(judged("", [kept, broken])).what
    'b'
    """
    own = [estimate for estimate in judgement.estimates if estimate.outcome == judgement.outcome]
    return next(iter(own or judgement.estimates), None)


def _words(part: Mapping[str, Any]) -> list[str]:
    """Name a part after its options that are short."""
    return [f"{key}={value}" for key, value in part.items() if isinstance(value, (str, int, float)) and value != ""]
