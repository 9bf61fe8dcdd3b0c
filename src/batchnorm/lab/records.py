"""A race as records and back: the file holds every curve, so a page can draw Figure 2 from it alone."""

from __future__ import annotations

from dataclasses import asdict

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.options import Options
from batchnorm.lab.runs.records import settings_of
from batchnorm.lab.summary import Lane, Result, summarise
from batchnorm.lab.verdict import verdicts
from batchnorm.records import Measurement, RecordFile


def to_records(result: Result, threads: int) -> RecordFile:
    """Write a race as records.

    >>> to_records(Result(Options(), (), 450, 10), threads=2).command
    'race'
    """
    summary = summarise(result)
    steps = result.lanes[0].curves[0].steps if result.lanes else ()
    return RecordFile(
        "race",
        {
            "options": asdict(result.options),
            "threads": threads,
            "evaluated_at": steps,
            "validation_images": result.validation_images,
            "classes": result.classes,
        },
        tuple(measurement for lane in result.lanes for measurement in lane_records(lane)),
        {
            "seconds": result.seconds,
            "interrupted": result.interrupted,
            "target": summary.target,
            "rows": [asdict(row) for row in summary.rows],
            "verdicts": [asdict(verdict) for verdict in verdicts(summary)],
        },
    )


def lane_records(lane: Lane) -> list[Measurement]:
    """Write one variant: its time, and two series for each network.

    >>> [record.quantity for record in lane_records(Lane("BN-x5", (), 0.5, 3.0))]
    ['core seconds per network']
    """
    about = {"variant": lane.variant, "best_rate": lane.learning_rate}
    records = [Measurement("core seconds per network", about, (lane.seconds_per_network,), "s")]
    for curve in lane.curves:
        setting = {"variant": lane.variant, **asdict(curve.member), "diverged_at": curve.diverged_at}
        records.append(Measurement("validation accuracy", setting, curve.accuracy))
        records.append(Measurement("training loss", setting, curve.loss, "nats"))
    return records


def from_records(records: RecordFile) -> Result:
    """Read a race back from its records.

    >>> result = Result(Options(), (), 450, 10)
    >>> from_records(to_records(result, threads=2)) == result
    True
    """
    if records.command != "race":
        raise BatchNormError(f"these are the records of {records.command!r}, not of a race")
    configuration = records.configuration
    steps = tuple(configuration["evaluated_at"])
    lanes = []
    for about in (m for m in records.measurements if m.quantity == "core seconds per network"):
        own = [m for m in records.measurements if m.setting["variant"] == about.setting["variant"]]
        accuracy = [m for m in own if m.quantity == "validation accuracy"]
        loss = [m for m in own if m.quantity == "training loss"]
        curves = tuple(
            Curve(
                Member(a.setting["learning_rate"], a.setting["seed"]),
                steps,
                a.samples,
                b.samples,
                a.setting["diverged_at"],
            )
            for a, b in zip(accuracy, loss, strict=True)
        )
        lanes.append(Lane(about.setting["variant"], curves, about.setting["best_rate"], about.samples[0]))
    return Result(
        settings_of(Options, configuration["options"]),
        tuple(lanes),
        configuration["validation_images"],
        configuration["classes"],
        records.summary["seconds"],
        records.summary["interrupted"],
    )
