"""The experiment "claim": one part of one claim, as a run of the store; and what the store holds of each claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.claims import claim_named
from batchnorm.lab.judge.claim import BUDGETS, Claim, Judgement, Part, not_run
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.store import Folder, Store, check_kinds
from batchnorm.lab.verdict import NOT_JUDGED
from batchnorm.records import values_of


def run(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Carry out one part of a claim.

    >>> run(claim.runs("quick")[0].options, recorder)  # doctest: +SKIP
    """
    part = {name: value for name, value in options.items() if name not in ("claim", "version")}
    return dict(claim_named(options["claim"]).measure(part, recorder))


@dataclass(frozen=True)
class ClaimState:
    """What a store holds of a claim: the largest budget of which all parts are finished, its parts, and the verdict."""

    claim: Claim
    budget: str
    parts: tuple[Part, ...]
    judgement: Judgement
    seconds: float  # of the processor: on a busy machine a run takes longer
    machine: Mapping[str, Any] = field(default_factory=dict)  # where the last part ran, and with which versions
    measured: str = ""  # the day on which the last part began
    problem: str = ""  # why finished runs could not be judged


def state_of(claim: Claim, store: Store) -> ClaimState:
    """Judge a claim from the finished runs of a store.

    >>> state_of(claim_named("algebra"), Store("no-such-store")).judgement.outcome
    'not judged'
    """
    problem = None
    for budget in reversed(BUDGETS):
        folders = [store.folder(each) for each in claim.runs(budget)]
        if folders and all(folder.finished for folder in folders):
            try:
                with results_of(claim):
                    parts = tuple(part_of(folder) for folder in folders)
                    seconds = sum(map(seconds_of, folders))
                    machine, day = machine_of(folders[-1]), day_of(folders)
                    return ClaimState(claim, budget, parts, claim.judge(parts), seconds, machine, day)
            except BatchNormError as error:
                problem = problem or error
    return ClaimState(claim, "", (), not_run(claim), 0.0) if problem is None else not_judged(claim, problem)


def results_of(claim: Claim) -> AbstractContextManager[None]:
    """Let results that the claim's own code would not have written raise one sentence."""
    do = f"delete its runs with batchnorm lab clean, and run it again with {claim.how_to_run}"
    return values_of(f"the results of {claim.name} in the store", do)


def not_judged(claim: Claim, problem: BatchNormError) -> ClaimState:
    """Return the state of a claim whose runs are finished and cannot be read."""
    return ClaimState(claim, "", (), Judgement(NOT_JUDGED, f"{problem}."), 0.0, problem=str(problem))


def part_of(folder: Folder) -> Part:
    """Return a finished run as a part of its claim."""
    options = {key: value for key, value in folder.run.options.items() if key not in ("claim", "version")}
    check_kinds(folder.path)
    return Part(options, folder.result())


def seconds_of(folder: Folder) -> float:
    """Return how many processor seconds a run took, in all its starts."""
    return sum(float(attempt.get("cpu_seconds", 0.0)) for attempt in folder.attempts())


def day_of(folders: Sequence[Folder]) -> str:
    """Return the day of the latest start of some runs."""
    return max((str(attempt.get("started", "")) for folder in folders for attempt in folder.attempts()), default="")[
        :10
    ]


def machine_of(folder: Folder) -> dict[str, Any]:
    """Return where a run ran, in its last start, without what differs from one start to the next."""
    last = folder.attempts()[-1:] or [{}]
    return {key: value for key, value in last[0].items() if key not in ("started", "process", "seconds", "cpu_seconds")}


def runs_of_claims(claims: Sequence[Claim], budget: str, store: Store) -> list[Folder]:
    """Add the runs of some claims to a store."""
    return [store.add(each) for claim in claims for each in claim.runs(budget)]
