"""Figure 1 as records and back: the file holds every curve, every drift and the percentiles that are drawn."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, Track, claims, sentence
from batchnorm.lab.figure1.present import notes
from batchnorm.lab.figure1.settings import SHARES, Figure1Settings
from batchnorm.lab.runs.records import settings_of
from batchnorm.records import Measurement, RecordFile

COMMAND = "figure1"
ACCURACY, LOSS, DRIFT, INPUT = "validation accuracy", "training loss", "drift of each unit", "input of one unit"
FACTS = ("data", "words", "checksum", "classes", "validated", "observed")
COSTS = ("seconds", "cpu_seconds", "peak_megabytes", "interrupted")


def to_records(outcome: Figure1Outcome, threads: int) -> RecordFile:
    """Write what was measured as records.

    >>> nothing = Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", "0f")
    >>> to_records(nothing, threads=2).configuration["checksum"]
    '0f'
    """
    return RecordFile(
        COMMAND,
        {
            "settings": asdict(outcome.settings),
            "threads": threads,
            **{name: getattr(outcome, name) for name in FACTS},
        },
        tuple(m for entry in outcome.entries for m in entry_records(entry)),
        {
            "sentence": sentence(outcome),
            "claims": [asdict(claim) for claim in claims(outcome)],
            "notes": notes(outcome),
            **{name: getattr(outcome, name) for name in COSTS},
        },
    )


def entry_records(entry: Figure1Entry) -> list[Measurement]:
    """Write one network from one start: two series for each curve, and what was followed on the fresh seeds.

    >>> entry_records(Figure1Entry("with BN", "he", 0.5, (), ()))
    []
    """
    about = {"network": entry.name, "init": entry.init, "reported_at": entry.rate}
    records = []
    for phase, curves in (("tuning", entry.tuning), ("report", [track.curve for track in entry.tracks])):
        for curve in curves:
            setting = {**about, "phase": phase, **asdict(curve.member)}
            setting |= {"diverged_at": curve.diverged_at, "evaluated_at": curve.steps}
            records.append(Measurement(ACCURACY, setting, curve.accuracy))
            records.append(Measurement(LOSS, setting, curve.loss, "nats"))
    for track in entry.tracks:
        own = {**about, "seed": track.curve.member.seed}
        records.append(Measurement(DRIFT, own, track.drifts))
        for share, values in zip(SHARES, track.percentiles, strict=True):
            records.append(Measurement(INPUT, {**own, "unit": track.unit, "share": share}, values))
    return records


def from_records(records: RecordFile) -> Figure1Outcome:
    """Read what was measured back from its records.

    >>> outcome = Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", "0f")
    >>> from_records(to_records(outcome, threads=2)) == outcome
    True
    """
    if records.command != COMMAND:
        raise BatchNormError(f"these are the records of {records.command!r}, not of {COMMAND}")
    grouped: dict[tuple[str, str, float], list[Measurement]] = {}
    for m in records.measurements:
        its = m.setting
        grouped.setdefault((its["network"], its["init"], its["reported_at"]), []).append(m)
    entries = []
    for (name, init, rate), own in grouped.items():
        tuning, fresh = curves(own, "tuning"), curves(own, "report")
        entries.append(Figure1Entry(name, init, rate, tuning, tuple(track(curve, own) for curve in fresh)))
    facts: dict[str, Any] = {name: records.configuration[name] for name in FACTS}
    facts |= {name: records.summary[name] for name in COSTS}
    return Figure1Outcome(settings_of(Figure1Settings, records.configuration["settings"]), tuple(entries), **facts)


def curves(own: list[Measurement], phase: str) -> tuple[Curve, ...]:
    """Return the curves of the tuning seeds, or of the fresh ones.

    >>> curves([], "tuning")
    ()
    """
    accuracy, loss = (
        [m for m in own if m.quantity == quantity and m.setting["phase"] == phase] for quantity in (ACCURACY, LOSS)
    )
    return tuple(
        Curve(
            Member(*(a.setting[key] for key in ("learning_rate", "seed", "momentum", "schedule", "clip"))),
            tuple(a.setting["evaluated_at"]),
            a.samples,
            b.samples,
            a.setting["diverged_at"],
        )
        for a, b in zip(accuracy, loss, strict=True)
    )


def track(curve: Curve, own: list[Measurement]) -> Track:
    """Return what was followed of a network on a fresh seed."""
    mine = [m for m in own if m.quantity in (DRIFT, INPUT) and m.setting["seed"] == curve.member.seed]
    (moved,) = (m for m in mine if m.quantity == DRIFT)
    inputs = {m.setting["share"]: m for m in mine if m.quantity == INPUT}
    low, middle, high = (inputs[share].samples for share in SHARES)
    return Track(curve, moved.samples, int(inputs[SHARES[1]].setting["unit"]), (low, middle, high))
