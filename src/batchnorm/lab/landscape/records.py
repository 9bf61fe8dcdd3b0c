"""The landscape as records and back: the file holds every band of every seed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.landscape.outcome import BandTrack, LandscapeOutcome, claims, sentence
from batchnorm.lab.landscape.present import notes
from batchnorm.lab.landscape.settings import LandscapeSettings
from batchnorm.lab.runs.records import settings_of
from batchnorm.records import Measurement, RecordFile

COMMAND = "landscape"
SERIES = {
    "loss_low": "least loss along the gradient",
    "loss_high": "largest loss along the gradient",
    "change_low": "least change of the gradient",
    "change_high": "largest change of the gradient",
    "weights": "norm of the hidden weights",
}
FACTS, COSTS = ("data", "words", "checksum"), ("seconds", "cpu_seconds", "peak_megabytes", "interrupted")


def to_records(outcome: LandscapeOutcome, threads: int) -> RecordFile:
    """Write what was measured as records.

    >>> nothing = LandscapeOutcome(LandscapeSettings(steps=9), (), {}, "digits", "of the digits", "0f")
    >>> to_records(nothing, threads=2).command
    'landscape'
    """
    return RecordFile(
        COMMAND,
        {
            "settings": asdict(outcome.settings),
            "threads": threads,
            "recorded_at": outcome.settings.recorded,
            **{name: getattr(outcome, name) for name in FACTS},
        },
        tuple(
            Measurement(
                words, {"arm": track.arm, "corrected": track.corrected, "seed": track.seed}, getattr(track, name)
            )
            for track in outcome.tracks
            for name, words in SERIES.items()
        ),
        {
            "sentence": sentence(outcome),
            "claims": [asdict(claim) for claim in claims(outcome)],
            "notes": notes(outcome),
            "accuracies": outcome.accuracies,
            **{name: getattr(outcome, name) for name in COSTS},
        },
    )


def from_records(records: RecordFile) -> LandscapeOutcome:
    """Read what was measured back from its records.

    >>> outcome = LandscapeOutcome(LandscapeSettings(steps=9), (), {}, "digits", "of the digits", "0f")
    >>> from_records(to_records(outcome, threads=2)) == outcome
    True
    """
    if records.command != COMMAND:
        raise BatchNormError(f"these are the records of {records.command!r}, not of {COMMAND}")
    names = {words: name for name, words in SERIES.items()}
    grouped: dict[tuple[str, bool, int], dict[str, tuple[float, ...]]] = {}
    for m in records.measurements:
        own = grouped.setdefault((m.setting["arm"], m.setting["corrected"], m.setting["seed"]), {})
        own[names[m.quantity]] = tuple(float("inf") if value != value else value for value in m.samples)
    facts: dict[str, Any] = {name: records.configuration[name] for name in FACTS}
    facts |= {name: records.summary[name] for name in COSTS}
    accuracies = {arm: tuple(values) for arm, values in records.summary["accuracies"].items()}
    tracks = tuple(BandTrack(*key, *(own[name] for name in SERIES)) for key, own in grouped.items())
    return LandscapeOutcome(
        settings_of(LandscapeSettings, records.configuration["settings"]), tracks, accuracies, **facts
    )
