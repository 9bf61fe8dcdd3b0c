"""What the landscape measured, and its claims, each judged by a rule that was written before it was run.

At each recorded step the loss and the change of the gradient are taken at several step sizes along the gradient. The
*loss band* is the largest minus the smallest loss; the *gradient change* is the largest distance to the gradient at the
start. A network's figures are the medians of both over the recorded steps, which are spaced evenly in log time.

1. With Batch Normalization the loss varies less along the gradient. 2. Its gradient changes less. 3. Both still hold
when step sizes and gradients are corrected for the norm of the weights. Each is the exact one-sided rank-sum test of
`batchnorm.lab.verdict` over seeds, at 5%; the third is confirmed if both parts are, refuted if one is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchnorm.lab.landscape.settings import PLAIN, WITH, LandscapeSettings
from batchnorm.lab.summary import Steps
from batchnorm.lab.verdict import NOT_JUDGED, Verdict, sooner, together, with_enough_seeds

LOSS, CHANGE = "loss", "change"
SERIES = ("loss_low", "loss_high", "change_low", "change_high", "weights")
CLAIMS = (
    "With Batch Normalization the loss varies less along the gradient",
    "Its gradient changes less",
    "Both hold when corrected for the norm of the weights",
)


@dataclass(frozen=True)
class BandTrack:
    """The bands of one network and seed over the recorded steps, raw or corrected for the norm of its weights.

    What is not finite is infinity. ``weights`` is the norm of the hidden layers' weights.
    """

    arm: str
    corrected: bool
    seed: int
    loss_low: tuple[float, ...]
    loss_high: tuple[float, ...]
    change_low: tuple[float, ...]
    change_high: tuple[float, ...]
    weights: tuple[float, ...]

    def widths(self, what: str) -> list[float]:
        """Return the loss band, or the largest change of the gradient, at each recorded step.

        >>> BandTrack("with BN", False, 0, (1.0,), (1.5,), (0.1,), (0.3,), (2.0,)).widths("loss")
        [0.5]
        """
        if what == CHANGE:
            return list(self.change_high)
        pairs = zip(self.loss_low, self.loss_high, strict=True)
        return [math.inf if high == math.inf else high - low for low, high in pairs]


def track_of(fields: Mapping[str, Any]) -> BandTrack:
    """Return a track from its fields as JSON has them.

    >>> fields = {"loss_low": [1.0], "loss_high": [None], "change_low": [], "change_high": [], "weights": [2.0]}
    >>> track_of({"arm": "with BN", "corrected": False, "seed": 0, **fields}).loss_high
    (inf,)
    """
    series = {key: tuple(math.inf if v is None else v for v in fields[key]) for key in SERIES}
    return BandTrack(fields["arm"], fields["corrected"], fields["seed"], **series)


@dataclass(frozen=True)
class LandscapeOutcome:
    """All that was measured of the landscape, on which data, and the accuracies at the end, seed by seed."""

    settings: LandscapeSettings
    tracks: tuple[BandTrack, ...]
    accuracies: dict[str, tuple[float, ...]]
    data: str
    words: str
    checksum: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0
    interrupted: bool = False

    def of(self, arm: str, corrected: bool = False) -> tuple[BandTrack, ...]:
        """Return one network's tracks, raw or corrected, a seed each."""
        return tuple(track for track in self.tracks if track.arm == arm and track.corrected == corrected)


def figures(outcome: LandscapeOutcome, arm: str, what: str, corrected: bool = False) -> tuple[float, ...]:
    """Return each seed's median over the recorded steps.

    >>> figures(LandscapeOutcome(LandscapeSettings(), (), {}, "digits", "", ""), "with BN", "loss")
    ()
    """
    return tuple(statistics.median(track.widths(what)) for track in outcome.of(arm, corrected))


def sentence(outcome: LandscapeOutcome) -> str:
    """Say in one sentence what came of it.

    >>> sentence(LandscapeOutcome(LandscapeSettings(), (), {}, "digits", "of the digits", ""))
    'Neither network was finished.'
    """
    if not outcome.of(PLAIN) or not outcome.of(WITH):
        return "Neither network was finished."
    (loss, plain_loss), (change, plain_change) = (
        [number(statistics.median(figures(outcome, arm, what))) for arm in (WITH, PLAIN)] for what in (LOSS, CHANGE)
    )
    corrected = [
        ratio(figures(outcome, PLAIN, what, corrected=True), figures(outcome, WITH, what, corrected=True))
        for what in (LOSS, CHANGE)
    ]
    return (
        f"Along the gradient the loss varies by {loss} with Batch Normalization and by {plain_loss} without, its "
        f"gradient changes by {change} and {plain_change}; corrected for the norm of the weights, {corrected[0]} and "
        f"{corrected[1]} times as much without."
    )


def number(value: float) -> str:
    """Write a figure of a band.

    >>> number(0.12345), number(1234.0), number(float("inf"))
    ('0.12', '1,234', 'infinity')
    """
    if not math.isfinite(value):
        return "infinity"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def claims(outcome: LandscapeOutcome) -> list[Verdict]:
    """Judge the claims: always three lines, in this order.

    >>> nothing = LandscapeOutcome(LandscapeSettings(), (), {}, "digits", "", "")
    >>> [each.outcome for each in claims(nothing)] == [NOT_JUDGED] * 3
    True
    """
    raw = [judged(outcome, what, corrected=False) for what in (LOSS, CHANGE)]
    corrected = [judged(outcome, what, corrected=True) for what in (LOSS, CHANGE)]
    both = NOT_JUDGED if NOT_JUDGED in [v for v, _ in corrected] else together([v for v, _ in corrected])
    words = "; ".join(dict.fromkeys(evidence for _, evidence in corrected))
    return with_enough_seeds(CLAIMS, (*raw, (both, words)), outcome.settings.seeds)


def judged(outcome: LandscapeOutcome, what: str, *, corrected: bool) -> tuple[str, str]:
    """Judge whether the network with Batch Normalization has the smaller figures.

    >>> judged(LandscapeOutcome(LandscapeSettings(), (), {}, "digits", "", ""), "loss", corrected=False)
    ('not judged', 'it was not run')
    """
    found = {arm: figures(outcome, arm, what, corrected) for arm in (WITH, PLAIN)}
    if not all(found.values()):
        return NOT_JUDGED, "it was not run"
    name = "loss band" if what == LOSS else "gradient change"
    words = ", ".join(f"{name} {number(statistics.median(values))} {arm}" for arm, values in found.items())
    return sooner(Steps(found[WITH]), Steps(found[PLAIN])), words


def ratio(first: Sequence[float], second: Sequence[float]) -> str:
    """Write how many times the second the first is, in the median.

    >>> ratio((1.0, 2.0, 3.0), (4.0, 4.0, 4.0)), ratio((math.inf,), (math.inf,))
    ('0.5', '?')
    """
    above, below = statistics.median(first), statistics.median(second)
    return number(above / below) if math.isfinite(below) and below > 0 else "?"
