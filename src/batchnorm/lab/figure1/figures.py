"""How the records of Figure 1 are drawn: accuracy, and what one unit of each network is given, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from batchnorm.lab.curves import median_curve
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, Track, accuracies, drifts, sentence
from batchnorm.lab.figure1.present import notes
from batchnorm.lab.figure1.records import from_records
from batchnorm.lab.figure1.settings import PLAIN, WITH
from batchnorm.lab.figures.verdicts import KINDS
from batchnorm.records import RecordFile
from batchnorm.report.sections import Headline, Line, Panel, Panels, Table, thinned

COLORS = {PLAIN: "vermillion", WITH: "blue"}
ROWS = 40


def draw(records: RecordFile) -> Panels | Headline:
    """Draw the sentence and its three charts.

    >>> from batchnorm.lab.figure1.settings import Figure1Settings
    >>> from batchnorm.lab.figure1.records import to_records
    >>> draw(to_records(Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", ""), threads=2)).title
    'Neither network was finished.'
    """
    outcome = from_records(records)
    pair = outcome.of(outcome.settings.inits[0])
    if not pair:
        return Headline(sentence(outcome), "", notes=tuple(notes(outcome)))
    chosen = {name: typical(pair[name].tracks) for name in (PLAIN, WITH)}
    values = [v for track in chosen.values() for row in track.percentiles for v in row]
    room = 0.05 * (max(values) - min(values))
    span = (min(values) - room, max(values) + room)
    first, *others = outcome.settings.inits
    dotted = f" (dotted: from {', '.join(others)})" if others else ""
    return Panels(
        sentence(outcome),
        f"Accuracy {outcome.words}, from {first}: the median of the seeds and their span{dotted}. Then the 15th, 50th "
        "and 85th percentiles of the input of a typical sigmoid, that of the median seed and unit by drift, over "
        f"{outcome.observed:,} images in evaluation mode.",
        (accuracy(outcome), *(inputs(name, track, span) for name, track in chosen.items())),
        height=290,
        table=numbers(pair, chosen),
        notes=tuple(notes(outcome)),
    )


def typical(tracks: Sequence[Track]) -> Track:
    """Return the network with the median drift, the lower of two."""
    return sorted(tracks, key=lambda track: track.drift)[(len(tracks) - 1) // 2]


def accuracy(outcome: Figure1Outcome) -> Panel:
    """Draw the accuracy from every start: the first as lines with the span of the seeds, others dashed."""
    lines = []
    first = outcome.settings.inits[0]
    for init in outcome.settings.inits:
        for name, entry in outcome.of(init).items():
            curves = [track.curve for track in entry.tracks]
            columns = list(zip(*(curve.accuracy for curve in curves), strict=True))
            band = {"low": [min(c) for c in columns], "high": [max(c) for c in columns]} if init == first else {}
            look = {"dash": "solid" if init == first else "dot", "width": 2.2 if init == first else 1.4}
            words = name if init == first else ""
            lines.append(Line(words, curves[0].steps, median_curve(curves), COLORS[name], **band, **look))  # type: ignore[arg-type]
    return Panel("accuracy", tuple(lines), "training steps", percent=True)


def inputs(name: str, track: Track, span: tuple[float, float]) -> Panel:
    """Draw the three percentiles of one unit; both networks have one axis."""
    steps, color = track.curve.steps, COLORS[name]
    low, middle, high = track.percentiles
    lines = (
        Line("85%", steps, high, color, width=1.2),
        Line("50%", steps, middle, color, low=low, high=high),
        Line("15%", steps, low, color, width=1.2, nudge=16),
    )
    return Panel(f"{name}: the input of a sigmoid", lines, "training steps", y_range=span)


def numbers(pair: dict[str, Figure1Entry], chosen: dict[str, Track]) -> Table:
    """Write the charts as a table, some of the validations."""
    medians = {name: median_curve([track.curve for track in pair[name].tracks]) for name in chosen}
    steps = chosen[PLAIN].curve.steps
    rows = tuple(
        (
            f"{steps[at]:,}",
            *(f"{medians[name][at]:.1%}" for name in chosen),
            *(" / ".join(f"{row[at]:.2f}" for row in track.percentiles) for track in chosen.values()),
        )
        for at in thinned(range(len(steps)), ROWS)
    )
    columns = ("step", *(f"accuracy {name}" for name in chosen), *(f"15 / 50 / 85 % {name}" for name in chosen))
    return Table("Figure 1", "", columns, rows, numbers=tuple(range(len(columns))))


def claims(records: RecordFile) -> Table:
    """Draw one row for each claim."""
    return Table(
        "Three claims, here",
        "Each by a rule that was written before the run: an exact rank test over fresh seeds.",
        ("claim", "in this run", "evidence"),
        tuple((each["claim"], each["outcome"], each["evidence"]) for each in records.summary["claims"]),
        badges=KINDS,
    )


def networks(records: RecordFile) -> Table | None:
    """Draw one row for each network and start."""
    outcome = from_records(records)
    rows = tuple(
        (
            f"{entry.name}, {entry.init}",
            f"{entry.rate:g}",
            f"{statistics.median(reads):.1%}\n{min(reads):.1%} to {max(reads):.1%}",
            f"{statistics.median(moved):.2f}\n{min(moved):.2f} to {max(moved):.2f}",
            f"{sum(track.curve.diverged_at is not None for track in entry.tracks)}/{len(entry.tracks)}",
        )
        for entry in outcome.entries
        if entry.tracks
        for reads, moved in [(accuracies(entry, outcome.settings), drifts(entry))]
    )
    return (
        Table(
            "Both networks, from each start",
            "The best mean of five validations, and the drift of the median unit of the last hidden layer: how far its "
            "percentiles move over training. Medians of the seeds, and below their span.",
            ("network, start", "rate", "best accuracy", "drift", "diverged"),
            rows,
            numbers=(1, 2, 3, 4),
        )
        if rows
        else None
    )


FIGURES = (draw, claims, networks)
