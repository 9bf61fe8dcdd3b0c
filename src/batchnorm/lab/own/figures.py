"""How the records of a race of the user's own network are drawn."""

from __future__ import annotations

import math
from typing import Any

from batchnorm.lab.depth.figures.accuracy import numbers, traces_of
from batchnorm.lab.depth.outcome import smoothed
from batchnorm.lab.figures.accuracy import MARKED, READING, layout
from batchnorm.lab.figures.rates import plot
from batchnorm.lab.own.present import arm, notes, sentence, steps, sweep_rows, verdict
from batchnorm.lab.own.records import from_records
from batchnorm.records import RecordFile
from batchnorm.report.sections import Bar, Headline, Plot

LOOKS = {"without BN": ("ink", "dash"), "with BN": ("blue", "solid")}


def headline(records: RecordFile) -> Headline:
    """Draw the sentence, and the steps of both networks as bars.

    >>> headline(own_records(Duel("net.py:make", DepthSettings(), None, None, (), "", 10, 450, 2.0, 300.0), 1)).title
    'No arm was finished.'
    """
    duel = from_records(records)
    found, judged, bars = steps(duel), verdict(duel), []
    lead = f"{duel.model}. {judged.outcome.capitalize()}: {judged.evidence}."
    if found is not None:
        without, with_bn, target = found
        lead = (
            f"{duel.model}. {judged.outcome.capitalize()}. Steps to {target:.1%}, the best without BN at its own best "
            f"rate; medians of {duel.settings.seeds} fresh seeds."
        )
        for (name, (colour, _)), own in zip(LOOKS.items(), (without, with_bn), strict=True):
            never = own.median == math.inf
            bars.append(Bar(name, 0.0 if never else own.median, "never" if never else f"{own.median:,.0f}", colour))
    arms = [arm(duel, entry) for entry in (duel.plain, duel.normed) if entry is not None]
    return Headline(sentence(duel), lead, notes=(*arms, *notes(duel)), bars=tuple(bars))


def accuracy(records: RecordFile) -> Plot | None:
    """Draw the validation accuracy of both networks over the steps.

    >>> accuracy(own_records(Duel("net.py:make", DepthSettings(), None, None, (), "", 10, 450, 2.0, 300.0), 1)) is None
    True
    """
    duel = from_records(records)
    if duel.plain is None or duel.normed is None:
        return None
    found = steps(duel)
    target = None if found is None else found[2]
    window = duel.settings.smoothed_over
    arms = {e.arm: [smoothed(curve, window) for curve in e.curves] for e in (duel.plain, duel.normed)}
    traces: list[dict[str, Any]] = []
    for (name, curves), its in zip(arms.items(), found[:2] if found else (None, None), strict=True):
        traces += traces_of(name, curves, LOOKS[name], target, its)
    return Plot(
        "Accuracy over the steps",
        READING + ("" if target is None else MARKED),
        "Line chart of validation accuracy over training steps, with and without BN; the table has the numbers.",
        {"data": traces, "layout": layout(duel.plain.curves[0].steps, target)},
        height=400,
        table=numbers(arms),
        notes=(f"Each accuracy is the mean of {window} validations.",),
    )


def rates(records: RecordFile) -> Plot | None:
    """Draw the best accuracy of both networks at every rate.

    >>> rates(own_records(Duel("net.py:make", DepthSettings(), None, None, (), "", 10, 450, 2.0, 300.0), 1)) is None
    True
    """
    rows = sweep_rows(from_records(records))
    if not rows:
        return None
    without, with_bn = ({row[0]: (row[column], "") for row in rows} for column in (1, 2))
    return plot(
        "Which learning rates work",
        {"without BN": without, "with BN": with_bn},
        "The best validation accuracy of the median tuning seed, for both networks at every rate.",
    )


FIGURES = (headline, accuracy, rates)
