"""The states of claims as records: what the page of all claims is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.judge.claim import QUESTIONS
from batchnorm.lab.judge.evidence import Estimate
from batchnorm.lab.judge.measure import ClaimState, not_judged, results_of
from batchnorm.records import RecordFile, typed
from batchnorm.report.stored import from_plain, to_plain

COMMAND = "lab claims"
CARD = ("name", "title", "statement", "rule", "method", "limits", "retelling", "version")
INFINITE = {math.inf: "infinite", -math.inf: "-infinite"}  # JSON has no such numbers


def to_records(states: Sequence[ClaimState]) -> RecordFile:
    """Return everything that a page shows of these claims.

    >>> to_records([]).command
    'lab claims'
    """
    return RecordFile(COMMAND, {}, (), {"claims": [claim_fields(state) for state in states]}, shared_machine(states))


def drawable(state: ClaimState) -> ClaimState:
    """Return the state, or that of a claim that is not judged if its results cannot be drawn.

    >>> drawable(state)  # doctest: +SKIP
    """
    try:
        with results_of(state.claim):
            for section in state.claim.draw(state.parts) if state.parts else []:
                from_plain(to_plain(section))
    except BatchNormError as error:
        return not_judged(state.claim, error)
    return state


def claim_fields(state: ClaimState) -> dict[str, Any]:
    """Return one claim: its card, its verdict with the estimates, and its pictures."""
    claim, judgement = state.claim, state.judgement
    return {
        **{name: getattr(claim, name) for name in CARD},
        "question": QUESTIONS[claim.question],
        "source": asdict(claim.source),
        "command": claim.how_to_run + (" --budget full" if state.budget == "full" else ""),
        "outcome": judgement.outcome,
        "sentence": judgement.sentence,
        "estimates": [stored(estimate) for estimate in judgement.estimates],
        "seeds": judgement.seeds,
        "budget": state.budget,
        "seconds": state.seconds,
        "measured": state.measured,
        "sections": [to_plain(section) for section in claim.draw(state.parts)] if state.parts else [],
    }


def stored(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate for a file; infinity is kept as a word.

    >>> stored(Estimate("steps", math.inf, 3.0, math.inf, threshold=2.0))["value"]
    'infinite'
    """
    return {
        key: INFINITE.get(value, value) if isinstance(value, float) else value
        for key, value in asdict(estimate).items()
    }


def restored(found: Mapping[str, Any]) -> Estimate:
    """Return the estimate that was stored; raise ``ValueError`` if it is not one.

    >>> restored(stored(Estimate("steps", math.inf, 3.0, math.inf, threshold=2.0))).value
    inf
    """
    words: dict[Any, float] = {word: number for number, word in INFINITE.items()} | {None: math.nan}
    numbers = ("value", "low", "high", "threshold")
    made = {key: value for key, value in found.items() if key not in numbers}
    typed(made, {"what": str, "above": bool, "unit": str}, "an estimate", ("what", "above", "unit"))
    for key in numbers:
        value = found[key]
        made[key] = words[value] if value is None or isinstance(value, str) else float(value)
    if not math.isfinite(made["threshold"]):
        raise ValueError(f"the threshold of {made['what']!r:.40} is not a number")
    return Estimate(**{field.name: made[field.name] for field in fields(Estimate)})


def shared_machine(states: Sequence[ClaimState]) -> dict[str, Any]:
    """Return what is the same of all machines that measured; nothing of where the page is made."""

    def machines() -> Iterator[Mapping[str, Any]]:
        return (state.machine for state in states if state.budget)

    first = next(machines(), {})
    return {key: value for key, value in first.items() if value and all(each.get(key) == value for each in machines())}
