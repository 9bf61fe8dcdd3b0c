"""What Figure 1 measured, and its claims, each judged by a rule that was written before it was run.

The *drift* of a unit is how far the 15th, 50th and 85th percentiles of its inputs move over training: the largest minus
the smallest value of each, averaged over the three. That of a network is the median over the 100 units of its last
hidden layer. The *accuracy* is the best mean of five validations in a row.

1. Batch Normalization reads more: its accuracies are higher. 2. Its last layer is given steadier inputs: its drifts are
smaller. 3. A better start narrows the gap: the errors that BN saves, seed by seed, are fewer with the second start than
with the first. Each is the exact one-sided rank-sum test of `batchnorm.lab.verdict` over fresh seeds, at 5%.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from batchnorm.lab.curves import Curve, best_accuracy
from batchnorm.lab.depth.outcome import smoothed
from batchnorm.lab.figure1.settings import PLAIN, WITH, Figure1Settings
from batchnorm.lab.summary import Steps, at_rate, rates_in, typical_best
from batchnorm.lab.verdict import NOT_JUDGED, Verdict, sooner, with_enough_seeds

CLAIMS = (
    "With Batch Normalization the network reads more",
    "The inputs of its last layer are steadier",
    "A better start narrows the gap",
)


@dataclass(frozen=True)
class Track:
    """One network on a fresh seed: its curve, each unit's drift, and one unit's percentiles at each validation.

    ``percentiles`` are the 15th, the 50th and the 85th of the unit whose drift is the median one (the lower of two).
    """

    curve: Curve
    drifts: tuple[float, ...]
    unit: int
    percentiles: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]

    @property
    def drift(self) -> float:
        """The median over the units."""
        return statistics.median(self.drifts)


@dataclass(frozen=True)
class Figure1Entry:
    """One network from one start: the curves from which its rate was chosen, and the fresh seeds at that rate."""

    name: str
    init: str
    rate: float
    tuning: tuple[Curve, ...]
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Figure1Outcome:
    """All that was measured for Figure 1; ``data``, ``words`` and ``checksum`` say on what."""

    settings: Figure1Settings
    entries: tuple[Figure1Entry, ...]
    data: str
    words: str
    checksum: str
    classes: int = 10
    validated: int = 0
    observed: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0
    interrupted: bool = False

    def of(self, init: str) -> dict[str, Figure1Entry]:
        """Return the networks from one start by their names, if both were finished."""
        found = {entry.name: entry for entry in self.entries if entry.init == init and entry.tracks}
        return found if len(found) == 2 else {}


def accuracies(entry: Figure1Entry, settings: Figure1Settings) -> tuple[float, ...]:
    """Return the best smoothed accuracy of each fresh seed.

    >>> accuracies(Figure1Entry(PLAIN, "xavier", 0.1, (), ()), Figure1Settings())
    ()
    """
    return tuple(best_accuracy(smoothed(track.curve, settings.smoothed_over)) for track in entry.tracks)


def drifts(entry: Figure1Entry) -> tuple[float, ...]:
    """Return the drift of each fresh seed.

    >>> drifts(Figure1Entry(PLAIN, "xavier", 0.1, (), ()))
    ()
    """
    return tuple(track.drift for track in entry.tracks)


def sentence(outcome: Figure1Outcome) -> str:
    """Say in one sentence what came of it.

    >>> sentence(Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", ""))
    'Neither network was finished.'
    """
    pair = outcome.of(outcome.settings.inits[0])
    if not pair:
        return "Neither network was finished."
    reads = {name: statistics.median(accuracies(entry, outcome.settings)) for name, entry in pair.items()}
    moves = {name: statistics.median(drifts(entry)) for name, entry in pair.items()}
    return (
        f"With Batch Normalization the sigmoids read {reads[WITH]:.1%} {outcome.words}, without {reads[PLAIN]:.1%}; "
        f"what the last layer is given drifts by {moves[WITH]:.2g} against {moves[PLAIN]:.2g}."
    )


def claims(outcome: Figure1Outcome) -> list[Verdict]:
    """Judge the claims: always three lines, in this order.

    >>> nothing = Figure1Outcome(Figure1Settings(), (), "digits", "of the digits", "")
    >>> [each.outcome for each in claims(nothing)] == [NOT_JUDGED] * 3
    True
    """
    first, *others = (outcome.of(init) for init in outcome.settings.inits)
    judged = (reads_more(outcome, first), steadier(first), narrower(outcome, first, others[0] if others else {}))
    return with_enough_seeds(CLAIMS, judged, outcome.settings.seeds)


def smaller(first: tuple[float, ...], second: tuple[float, ...]) -> str:
    """Judge whether the first values are smaller than the second: the exact rank-sum test.

    >>> smaller((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    'confirmed'
    """
    return sooner(Steps(first), Steps(second))


def errors(entry: Figure1Entry, settings: Figure1Settings) -> tuple[float, ...]:
    """Return the share of images that each fresh seed reads wrong."""
    return tuple(round(1 - value, 9) for value in accuracies(entry, settings))


def reads_more(outcome: Figure1Outcome, pair: dict[str, Figure1Entry]) -> tuple[str, str]:
    """Judge the first claim.

    >>> reads_more(Figure1Outcome(Figure1Settings(), (), "digits", "", ""), {})
    ('not judged', 'it was not run')
    """
    if not pair:
        return NOT_JUDGED, "it was not run"
    wrong = {name: errors(entry, outcome.settings) for name, entry in pair.items()}
    words = ", ".join(f"{1 - statistics.median(wrong[name]):.1%} {name}" for name in (WITH, PLAIN))
    return smaller(wrong[WITH], wrong[PLAIN]), words


def steadier(pair: dict[str, Figure1Entry]) -> tuple[str, str]:
    """Judge the second claim.

    >>> steadier({})
    ('not judged', 'it was not run')
    """
    if not pair:
        return NOT_JUDGED, "it was not run"
    found = {name: drifts(entry) for name, entry in pair.items()}
    words = ", ".join(f"drift {statistics.median(found[name]):.2f} {name}" for name in (WITH, PLAIN))
    return smaller(found[WITH], found[PLAIN]), words


def narrower(
    outcome: Figure1Outcome, first: dict[str, Figure1Entry], second: dict[str, Figure1Entry]
) -> tuple[str, str]:
    """Judge the third claim.

    >>> narrower(Figure1Outcome(Figure1Settings(inits=("he",)), (), "digits", "", ""), {}, {})
    ('not judged', 'it takes two starts')
    """
    if not first or not second:
        return NOT_JUDGED, "it takes two starts"
    gaps = [saved(outcome, pair) for pair in (first, second)]
    words = ", ".join(
        f"{100 * statistics.median(gap):+.1f} points from {init}"
        for gap, init in zip(gaps, outcome.settings.inits[:2], strict=True)
    )
    return smaller(gaps[1], gaps[0]), words


def saved(outcome: Figure1Outcome, pair: dict[str, Figure1Entry]) -> tuple[float, ...]:
    """Return the share of errors that Batch Normalization saves, seed by seed."""
    columns = (errors(pair[name], outcome.settings) for name in (PLAIN, WITH))
    return tuple(round(plain - normed, 9) for plain, normed in zip(*columns, strict=True))


def choose_rate(tuning: tuple[Curve, ...], settings: Figure1Settings) -> float:
    """Choose the rate with the highest median of best accuracies, of those at which no tuning seed diverges.

    >>> from batchnorm.lab.curves import Member
    >>> tuned = tuple(Curve(Member(rate, 0), (10,), (rate,), (1.0,)) for rate in (0.1, 0.3))
    >>> choose_rate(tuned, Figure1Settings())
    0.3
    """
    curves = [smoothed(curve, settings.smoothed_over) for curve in tuning]
    rates = rates_in(curves)
    stable = [rate for rate in rates if all(curve.diverged_at is None for curve in at_rate(curves, rate))]
    return max(stable or rates, key=lambda rate: typical_best(at_rate(curves, rate)))
