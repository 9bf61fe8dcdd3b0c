"""The experiment "claim": one part of one claim, as a run of the store; and what the store holds of each claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchnorm.lab.claims import claim_named
from batchnorm.lab.judge.claim import BUDGETS, Claim, Judgement, Part, not_run
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.store import Folder, Store


def run(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Carry out one part of a claim.

    >>> run(claim.runs("quick")[0].options, recorder)  # doctest: +SKIP
    """
    part = {name: value for name, value in options.items() if name not in ("claim", "version")}
    return dict(claim_named(options["claim"]).measure(part, recorder))


@dataclass(frozen=True)
class State:
    """What a store holds of a claim: the largest budget of which all parts are finished, its parts, and the verdict."""

    claim: Claim
    budget: str
    parts: tuple[Part, ...]
    judgement: Judgement
    seconds: float
    machine: Mapping[str, Any] = field(default_factory=dict)  # where the last part ran, and with which versions


def state_of(claim: Claim, store: Store) -> State:
    """Judge a claim from the finished runs of a store.

    >>> state_of(claim_named("algebra"), Store("no-such-store")).judgement.outcome
    'not judged'
    """
    for budget in reversed(BUDGETS):
        runs = claim.runs(budget)
        folders = [store.folder(each) for each in runs]
        if runs and all(folder.finished for folder in folders):
            parts = tuple(part_of(folder) for folder in folders)
            machine = machine_of(folders[-1])
            return State(claim, budget, parts, claim.judge(parts), sum(map(seconds_of, folders)), machine)
    return State(claim, "", (), not_run(claim), 0.0)


def part_of(folder: Folder) -> Part:
    """Return a finished run as a part of its claim."""
    options = {key: value for key, value in folder.run.options.items() if key not in ("claim", "version")}
    return Part(options, folder.result())


def seconds_of(folder: Folder) -> float:
    """Return for how long a run ran, in all its starts."""
    return sum(float(attempt.get("seconds", 0.0)) for attempt in folder.attempts())


def machine_of(folder: Folder) -> dict[str, Any]:
    """Return where a run ran, in its last start, without what differs from one start to the next."""
    last = folder.attempts()[-1:] or [{}]
    return {key: value for key, value in last[0].items() if key not in ("started", "process", "seconds")}


def runs_of_claims(claims: Sequence[Claim], budget: str, store: Store) -> list[Folder]:
    """Add the runs of some claims to a store."""
    return [store.add(each) for claim in claims for each in claim.runs(budget)]
