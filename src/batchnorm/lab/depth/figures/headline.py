"""The first screen: one sentence, and the steps of every arm as bars."""

from __future__ import annotations

import math

from batchnorm.lab.depth.arms import NOTES
from batchnorm.lab.depth.figures.looks import LOOKS
from batchnorm.lab.depth.outcome import depth_of, depths_of
from batchnorm.lab.depth.present import BESIDE, FIRST, little_gain, regime, sentence
from batchnorm.lab.depth.records import from_records
from batchnorm.records import RecordFile
from batchnorm.report.sections import Bar, Headline


def draw(records: RecordFile) -> Headline:
    """Draw the headline.

    >>> draw(residual_records(DepthOutcome(DepthSettings(), (), 10, 450), threads=2)).title
    'No arm was finished.'
    """
    outcome = from_records(records)
    depth = depth_of(outcome, outcome.settings.headline)
    lead, bars = "", []
    if depth is not None and depth.target is not None:
        verdict = str(records.summary["claims"][0]["outcome"]).capitalize()
        lead = (
            f"{verdict}. Steps to {depth.target:.1%} of {outcome.settings.images}, the best that {depth.blocks} "
            "residual blocks reach without BN at their own best learning rate; medians of "
            f"{outcome.settings.seeds} fresh seeds."
        )
        for name in (*FIRST, *BESIDE):
            if name in depth.steps:
                median = depth.steps[name].median
                never = f"never: best {depth.accuracy[name]:.1%}"
                text = never if median == math.inf else f"{median:,.0f}"
                length = 0.0 if median == math.inf else median
                bars.append(Bar(name, length, text, LOOKS[name][0], NOTES.get(name, "")))
    notes = tuple(filter(None, (regime(outcome), little_gain(depths_of(outcome)))))
    return Headline(sentence(outcome), lead, notes=notes, bars=tuple(bars))
