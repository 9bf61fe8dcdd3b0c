"""The race of a user's network as records and back: the file holds every curve."""

from __future__ import annotations

from dataclasses import asdict

from batchnorm.lab.depth.arms import PLAIN, DepthSettings
from batchnorm.lab.depth.records import entries_of, entry_records
from batchnorm.lab.own.present import lines, sentence, sweep_rows, verdict
from batchnorm.lab.own.race import WITH, Duel
from batchnorm.lab.runs.records import settings_of
from batchnorm.records import RecordFile

COMMAND = "race --model"


def to_records(duel: Duel, threads: int) -> RecordFile:
    """Write a race as records: every curve, and the figures."""
    entries = [entry for entry in (duel.plain, duel.normed) if entry is not None]
    return RecordFile(
        COMMAND,
        {
            "model": duel.model,
            "settings": asdict(duel.settings),
            "threads": threads,
            "evaluated_at": entries[0].curves[0].steps if entries else (),
            "places": duel.places,
            "classes": duel.classes,
            "validation_examples": duel.validation_examples,
        },
        tuple(m for entry in entries for m in entry_records(entry)),
        {
            "sentence": sentence(duel),
            "lines": lines(duel),
            "claims": [asdict(verdict(duel))],
            "sweep": [{"rate": rate, "without": a, "with": b} for rate, a, b in sweep_rows(duel)],
            "seconds": duel.seconds,
            "peak_megabytes": duel.peak_megabytes,
            "alone": duel.alone,
            "interrupted": duel.interrupted,
        },
    )


def from_records(records: RecordFile) -> Duel:
    """Read a race back from its records.

    >>> duel = Duel("net.py:make", DepthSettings(), None, None, ("1",), "", 10, 450, 2.0, 300.0)
    >>> from_records(to_records(duel, threads=2)) == duel
    True
    """
    given, summary = records.configuration, records.summary
    entries = {entry.arm: entry for entry in entries_of(records)}
    return Duel(
        given["model"],
        settings_of(DepthSettings, given["settings"]),
        entries.get(PLAIN.name),
        entries.get(WITH.name),
        tuple(given["places"]),
        summary["alone"],
        given["classes"],
        given["validation_examples"],
        summary["seconds"],
        summary["peak_megabytes"],
        summary["interrupted"],
    )
