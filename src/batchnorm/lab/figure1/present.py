"""Figure 1 on a terminal: the sentence, the claims, both networks from each start, and what to beware of."""

from __future__ import annotations

import statistics

from batchnorm.lab.depth.outcome import smoothed
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, accuracies, claims, drifts, sentence
from batchnorm.lab.figure1.settings import PAPER_STEPS, Figure1Settings

LATE = 0.95  # a best after this share of the steps is one that may still rise


def lines(outcome: Figure1Outcome) -> list[str]:
    """Write all of it, the sentence first.

    >>> lines(Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", ""))[0]
    'Neither network was finished.'
    """
    text = [sentence(outcome), *(f"{c.claim}: {c.outcome.upper()} ({c.evidence})." for c in claims(outcome)), ""]
    for entry in outcome.entries:
        if entry.tracks:
            reads, moved = accuracies(entry, outcome.settings), drifts(entry)
            text.append(
                f"  {entry.init:14}  {entry.name:10}  rate {entry.rate:<5g}  accuracy {statistics.median(reads):.1%} "
                f"({min(reads):.1%} to {max(reads):.1%})  drift {statistics.median(moved):.2f}"
            )
    return [*text, *notes(outcome)]


def notes(outcome: Figure1Outcome) -> list[str]:
    """Write how to read the figures, and what to beware of.

    >>> notes(Figure1Outcome(Figure1Settings(steps=9, every=1), (), "digits", "of the digits", ""))[-1]
    'Up to 9 steps in 0 s (0 s of processor time); peak memory 0 MB.'
    """
    settings, text = outcome.settings, []
    steps = f"{settings.steps:,}" if settings.steps else "no"
    if outcome.data == "digits":
        text.append(
            f"This is not the paper's figure: {steps} steps on the bundled 8x8 digits, where it has 50,000 on MNIST. "
            "Give MNIST's folder for that: --data DIR."
        )
    elif settings.steps != PAPER_STEPS:
        text.append(f"These are {steps} steps; the paper's figure has 50,000.")
    text.append(
        f"Each network has its own best of {len(settings.rates)} learning rates, chosen on tuning seeds; figures are "
        f"medians of {settings.seeds} fresh seed{'s' * (settings.seeds > 1)}. The paper gives neither rate nor start."
    )
    for entry in outcome.entries:
        if entry.tracks and len(settings.rates) > 1 and entry.rate in (settings.rates[0], settings.rates[-1]):
            end = "lowest" if entry.rate == settings.rates[0] else "highest"
            text.append(f"{entry.init}, {entry.name}: the best rate, {entry.rate:g}, is the {end} of the grid.")
    late = [f"{entry.name} from {entry.init}" for entry in outcome.entries if still_improving(entry, settings)]
    if late:
        text.append(f"Still improving when the steps end: {', '.join(late)}.")
    if outcome.interrupted:
        text.append("Interrupted: only what was finished is shown.")
    return [
        *text,
        f"Up to {steps} steps in {outcome.seconds:.0f} s ({outcome.cpu_seconds:.0f} s of processor time); "
        f"peak memory {outcome.peak_megabytes:.0f} MB.",
    ]


def still_improving(entry: Figure1Entry, settings: Figure1Settings) -> bool:
    """Whether most seeds have their best accuracy in the last steps.

    >>> still_improving(Figure1Entry("without BN", "xavier", 0.1, (), ()), Figure1Settings())
    False
    """
    late = 0
    for track in entry.tracks:
        values = smoothed(track.curve, settings.smoothed_over).accuracy
        late += values.index(max(values)) + 1 > LATE * len(values)
    return 2 * late > len(entry.tracks)
