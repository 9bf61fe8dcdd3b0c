"""The landscape on a terminal: the sentence, the claims, and what the scale of the weights alone does."""

from __future__ import annotations

import statistics

from batchnorm.lab.landscape.outcome import CHANGE, LOSS, LandscapeOutcome, claims, figures, ratio, sentence
from batchnorm.lab.landscape.settings import SCALE, SCALED, WITH


def artefact(outcome: LandscapeOutcome) -> str:
    """Say what the scale of the weights alone does to the raw figures; "" if it was not measured.

    >>> artefact(LandscapeOutcome(LandscapeSettings(), (), {}, "digits", "", ""))
    ''
    """
    if not outcome.of(SCALED):
        return ""
    parts = []
    for corrected, words in ((False, "raw"), (True, "corrected")):
        ratios = []
        for what in (LOSS, CHANGE):
            scaled, normed = (figures(outcome, arm, what, corrected) for arm in (SCALED, WITH))
            ratios.append(ratio(scaled, normed))
        parts.append(
            f"{words} the loss band is {ratios[0]} and the gradient change {ratios[1]} times that of the other"
        )
    return (
        f"The network with Batch Normalization and its hidden weights times {SCALE:g} computes the same: {parts[0]}, "
        f"{parts[1]}. What is raw tells the scale of the weights, too."
    )


def notes(outcome: LandscapeOutcome) -> list[str]:
    """Write how to read the figures.

    >>> notes(LandscapeOutcome(LandscapeSettings(steps=9), (), {}, "digits", "of the digits", ""))[-1]
    '9 steps in 0 s (0 s of processor time); peak memory 0 MB.'
    """
    settings, text = outcome.settings, []
    if note := artefact(outcome):
        text.append(note)
    text.append(
        f"Both networks: {settings.layers} layers of {settings.width} ReLUs from the same He weights, SGD at rate "
        f"{settings.rate:g}, batches of {settings.batch_size}, measured at {len(settings.recorded)} steps. Step sizes "
        f"are {settings.factors[0]:g} to {settings.factors[-1]:g} times the rate, as in Santurkar et al. (2018)."
    )
    reads = {arm: statistics.median(values) for arm, values in outcome.accuracies.items() if values}
    if len(reads) == 2:
        words = ", ".join(f"{value:.1%} {arm}" for arm, value in reads.items())
        text.append(f"Accuracy at the end, {outcome.words}: {words}. A smoother landscape alone is no better network.")
    if outcome.interrupted:
        text.append("Interrupted: only what was finished is shown.")
    return [
        *text,
        f"{settings.steps:,} steps in {outcome.seconds:.0f} s ({outcome.cpu_seconds:.0f} s of processor time); "
        f"peak memory {outcome.peak_megabytes:.0f} MB.",
    ]


def lines(outcome: LandscapeOutcome) -> list[str]:
    """Write all of it for a terminal, the sentence first.

    >>> lines(LandscapeOutcome(LandscapeSettings(steps=9), (), {}, "digits", "of the digits", ""))[0]
    'Neither network was finished.'
    """
    text = [sentence(outcome), *(f"{c.claim}: {c.outcome.upper()} ({c.evidence})." for c in claims(outcome))]
    return [*text, "", *notes(outcome)]
