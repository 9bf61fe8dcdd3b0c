"""How the records of the landscape are drawn: bands of losses and of gradients over training, raw and corrected."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchnorm.lab.figures.verdicts import KINDS
from batchnorm.lab.landscape.outcome import CHANGE, LOSS, LandscapeOutcome, figures, number, sentence
from batchnorm.lab.landscape.present import notes
from batchnorm.lab.landscape.records import from_records
from batchnorm.lab.landscape.settings import PLAIN, SCALED, WITH
from batchnorm.records import RecordFile
from batchnorm.report.sections import Headline, Line, Panel, Panels, Table

NAMED_AT = 0.45  # of the recorded steps: where the bands are apart
COLORS = {PLAIN: "vermillion", WITH: "blue", SCALED: "green"}


def draw(records: RecordFile) -> Panels | Headline:
    """Draw the sentence and four charts.

    >>> from batchnorm.lab.landscape.settings import LandscapeSettings
    >>> from batchnorm.lab.landscape.records import to_records
    >>> nothing = LandscapeOutcome(LandscapeSettings(steps=9), (), {}, "digits", "of the digits", "")
    >>> draw(to_records(nothing, threads=2)).title
    'Neither network was finished.'
    """
    outcome = from_records(records)
    if not outcome.of(PLAIN) or not outcome.of(WITH):
        return Headline(sentence(outcome), "", notes=tuple(notes(outcome)))
    return Panels(
        sentence(outcome),
        "Least and largest values along the gradient, at 1/2 to 4 times the learning rate, over training; medians of "
        "the seeds. Dotted: the network with BN and its hidden weights times 3, which computes the same.",
        tuple(panel(outcome, what, corrected) for corrected in (False, True) for what in (LOSS, CHANGE)),
        columns=2,
        height=190,
        table=numbers(outcome),
        notes=tuple(notes(outcome)),
    )


def panel(outcome: LandscapeOutcome, what: str, corrected: bool) -> Panel:
    """Draw the bands of both networks, and the edges of the band of the scaled one, which lie on it when corrected."""
    steps, lines = outcome.settings.recorded, []
    for arm, nudge in ((PLAIN, 0.0), (WITH, 20.0)):
        low, high = (edge(outcome, arm, what, side, corrected) for side in ("low", "high"))
        look = {"low": low, "high": high, "opacity": 0.45, "nudge": nudge, "named_at": NAMED_AT}
        lines.append(Line(arm, steps, (), COLORS[arm], **look))  # type: ignore[arg-type]
    for side in ("low", "high") if outcome.of(SCALED) else ():
        name = "weights x3" if side == "low" and what == CHANGE and not corrected else ""
        values = edge(outcome, SCALED, what, side, corrected)
        lines.append(Line(name, steps, values, COLORS[SCALED], "dot", 1.6, nudge=20.0, named_at=NAMED_AT))
    title = "loss along the gradient" if what == LOSS else "change of the gradient"
    return Panel(
        f"{title}, {'corrected for the weights' if corrected else 'raw'}",
        tuple(lines),
        "training steps",
        x_log=True,
        y_log=True,
    )


def edge(outcome: LandscapeOutcome, arm: str, what: str, side: str, corrected: bool) -> list[float | None]:
    """Return the median over the seeds of one edge of a band; None where it is infinite."""
    rows: list[Sequence[float]] = [getattr(track, f"{what}_{side}") for track in outcome.of(arm, corrected)]
    medians = (statistics.median(column) for column in zip(*rows, strict=True))
    return [value if math.isfinite(value) else None for value in medians]


def numbers(outcome: LandscapeOutcome) -> Table:
    """Write the bands as a table."""
    cells = [
        [edge(outcome, arm, what, side, corrected) for side in ("low", "high")]
        for corrected in (False, True)
        for what in (LOSS, CHANGE)
        for arm in (PLAIN, WITH)
    ]
    rows = tuple(
        (
            f"{step:,}",
            *(" to ".join("∞" if v is None else f"{v:.3g}" for v in (low[at], high[at])) for low, high in cells),
        )
        for at, step in enumerate(outcome.settings.recorded)
    )
    columns = (
        "step",
        *(f"{what}{words}, {arm}" for words in ("", ", corrected") for what in (LOSS, CHANGE) for arm in (PLAIN, WITH)),
    )
    return Table("Bands along the gradient", "", columns, rows, numbers=tuple(range(len(columns))))


def claims(records: RecordFile) -> Table:
    """Draw one row for each claim."""
    return Table(
        "Three claims, here",
        "Each by a rule that was written before the run: an exact rank test over seeds.",
        ("claim", "in this run", "evidence"),
        tuple((each["claim"], each["outcome"], each["evidence"]) for each in records.summary["claims"]),
        badges=KINDS,
    )


def networks(records: RecordFile) -> Table | None:
    """Draw one row for each network: the medians over training, raw and corrected."""
    outcome = from_records(records)
    rows = []
    for arm in (PLAIN, WITH, SCALED):
        if outcome.of(arm):
            values = [figures(outcome, arm, what, corrected) for corrected in (False, True) for what in (LOSS, CHANGE)]
            cells = (f"{number(statistics.median(v))}\n{number(min(v))} to {number(max(v))}" for v in values)
            rows.append((arm, *cells))
    return (
        Table(
            "The medians over training",
            "Of the loss band and of the largest change of the gradient; medians of the seeds, and below their span.",
            ("network", "loss band", "gradient change", "loss band, corrected", "gradient change, corrected"),
            tuple(rows),
            numbers=(1, 2, 3, 4),
        )
        if rows
        else None
    )


FIGURES = (draw, claims, networks)
