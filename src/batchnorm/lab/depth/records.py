"""The race of residual networks as records and back: the file holds every curve, so all figures can be made again."""

from __future__ import annotations

from dataclasses import asdict

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth.arms import DepthSettings
from batchnorm.lab.depth.claims import claims
from batchnorm.lab.depth.outcome import DepthEntry, DepthOutcome, depths_of
from batchnorm.lab.depth.present import sentence
from batchnorm.lab.runs.records import settings_of
from batchnorm.records import Measurement, RecordFile

COMMAND = "race --network residual"
ACCURACY, LOSS = "validation accuracy", "training loss"


def to_records(outcome: DepthOutcome, threads: int) -> RecordFile:
    """Write a race as records.

    >>> to_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2).command
    'race --network residual'
    """
    steps = outcome.entries[0].curves[0].steps if outcome.entries else ()
    return RecordFile(
        COMMAND,
        {
            "settings": asdict(outcome.settings),
            "threads": threads,
            "evaluated_at": steps,
            "classes": outcome.classes,
            "validation_examples": outcome.validation_examples,
        },
        tuple(m for entry in outcome.entries for m in entry_records(entry)),
        {
            "sentence": sentence(outcome),
            "claims": [asdict(claim) for claim in claims(outcome)],
            "depths": [asdict(depth) for depth in depths_of(outcome)],
            "seconds": outcome.seconds,
            "cpu_seconds": outcome.cpu_seconds,
            "peak_megabytes": outcome.peak_megabytes,
            "interrupted": outcome.interrupted,
        },
    )


def entry_records(entry: DepthEntry) -> list[Measurement]:
    """Write one arm at one depth: two series for each network.

    >>> entry_records(DepthEntry(2, "BN x5", 0.5, (), ()))
    []
    """
    records = []
    for phase, curves in (("tuning", entry.tuning), ("report", entry.curves)):
        for curve in curves:
            setting = {
                "arm": entry.arm,
                "blocks": entry.blocks,
                "phase": phase,
                "reported_at": entry.rate,
                **asdict(curve.member),
                "diverged_at": curve.diverged_at,
            }
            records.append(Measurement(ACCURACY, setting, curve.accuracy))
            records.append(Measurement(LOSS, setting, curve.loss, "nats"))
    return records


def from_records(records: RecordFile) -> DepthOutcome:
    """Read a race back from its records.

    >>> outcome = DepthOutcome(DepthSettings(), (), 10, 450)
    >>> from_records(to_records(outcome, threads=2)) == outcome
    True
    """
    if records.command != COMMAND:
        raise BatchNormError(f"these are the records of {records.command!r}, not of a race of residual networks")
    given, summary = records.configuration, records.summary
    return DepthOutcome(
        settings_of(DepthSettings, given["settings"]),
        entries_of(records),
        given["classes"],
        given["validation_examples"],
        summary["seconds"],
        summary["cpu_seconds"],
        summary["peak_megabytes"],
        summary["interrupted"],
    )


def entries_of(records: RecordFile) -> tuple[DepthEntry, ...]:
    """Read every arm back from the records of a race of residual networks, or of the user's own.

    >>> entries_of(RecordFile(COMMAND, {"evaluated_at": ()}, ()))
    ()
    """
    steps = tuple(records.configuration["evaluated_at"])
    grouped: dict[tuple[int, str, float], dict[str, list[Curve]]] = {}
    accuracies = [m for m in records.measurements if m.quantity == ACCURACY]
    losses = [m for m in records.measurements if m.quantity == LOSS]
    for accuracy, loss in zip(accuracies, losses, strict=True):
        its = accuracy.setting
        member = Member(its["learning_rate"], its["seed"], its["momentum"], its["schedule"], its["clip"])
        curve = Curve(member, steps, accuracy.samples, loss.samples, its["diverged_at"])
        place = grouped.setdefault((its["blocks"], its["arm"], its["reported_at"]), {"tuning": [], "report": []})
        place[its["phase"]].append(curve)
    return tuple(
        DepthEntry(blocks, arm, rate, tuple(curves["tuning"]), tuple(curves["report"]))
        for (blocks, arm, rate), curves in grouped.items()
    )
