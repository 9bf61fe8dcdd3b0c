"""Whether the paper's claims held in this run: confirmed, refuted or inconclusive, by a fixed rule.

One variant is sooner than another when the steps of their seeds are so well apart that a random relabelling of
the seeds would do as well at most once in twenty: the exact rank-sum test, one-sided. With three seeds each
that asks every seed of the one to be sooner than every seed of the other; with fewer the result is inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchnorm.lab.curves import best_accuracy
from batchnorm.lab.summary import SHARE, TRAINED, Lane, Steps, Summary
from batchnorm.lab.variants import BASELINE, RAISED_RATE, SAME_RATE, SIGMOID

CONFIRMED, REFUTED, INCONCLUSIVE = "confirmed", "refuted", "inconclusive"
NOT_JUDGED = "not judged"
SURE = 0.05
FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Verdict:
    """A claim, what became of it, and the evidence in a few words."""

    claim: str
    outcome: str
    evidence: str


def with_enough_seeds(claims: Sequence[str], judged: Iterable[tuple[str, str]], seeds: int) -> list[Verdict]:
    """Put each claim beside its verdict and evidence; from fewer than three seeds nothing is judged.

    >>> with_enough_seeds(["it is faster"], [("confirmed", "2 steps, 20 steps")], seeds=2)
    [Verdict(claim='it is faster', outcome='not judged', evidence='it takes 3 seeds; 2 steps, 20 steps')]
    """
    few = seeds < FEWEST_SEEDS
    return [
        Verdict(claim, NOT_JUDGED, f"it takes {FEWEST_SEEDS} seeds; {evidence}")
        if few and outcome != NOT_JUDGED
        else Verdict(claim, outcome, evidence)
        for claim, (outcome, evidence) in zip(claims, judged, strict=True)
    ]


def chance_of_sooner(first: Steps, second: Steps) -> float:
    """Give the share of pairs of seeds in which the first was sooner; a tie counts half.

    >>> chance_of_sooner(Steps((10, 30)), Steps((20, 30)))
    0.625
    """
    pairs = [(a, b) for a in first.seeds for b in second.seeds]
    return sum(1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def luck(first: Steps, second: Steps) -> float:
    """Give the share of all relabellings of the seeds in which the first would be as soon as it is, or sooner.

    >>> luck(Steps((1, 2, 3)), Steps((4, 5, 6)))  # one relabelling in twenty: this one
    0.05
    """
    pooled = sorted((*first.seeds, *second.seeds))
    # Twice the mean rank of each value, so that ties stay whole numbers.
    ranks = [pooled.index(value) + len(pooled) - 1 - pooled[::-1].index(value) for value in pooled]
    observed = sum(ranks[pooled.index(value)] for value in first.seeds)
    ways = {(0, 0): 1}  # how many choices of so many values have ranks of such a sum
    for rank in ranks:
        grown = dict(ways)
        for (chosen, total), count in ways.items():
            if chosen < len(first.seeds):
                key = chosen + 1, total + rank
                grown[key] = grown.get(key, 0) + count
        ways = grown
    sums = {total: count for (chosen, total), count in ways.items() if chosen == len(first.seeds)}
    return sum(count for total, count in sums.items() if total <= observed) / sum(sums.values())


def sooner(first: Steps, second: Steps) -> str:
    """Judge whether the first needs fewer steps than the second.

    >>> sooner(Steps((10, 20, 30)), Steps((40, 50, 60)))
    'confirmed'
    """
    if luck(first, second) <= SURE:
        return CONFIRMED
    return REFUTED if luck(second, first) <= SURE else INCONCLUSIVE


def together(outcomes: list[str]) -> str:
    """Judge a claim made of parts: refuted if one part is, confirmed if all are.

    >>> together(["confirmed", "inconclusive"])
    'inconclusive'
    """
    if REFUTED in outcomes:
        return REFUTED
    return CONFIRMED if outcomes and all(outcome == CONFIRMED for outcome in outcomes) else INCONCLUSIVE


def verdicts(summary: Summary) -> list[Verdict]:
    """Judge the race.

    >>> verdicts(summarise(run(Options())))  # doctest: +SKIP
    """
    return [*order(summary), *sigmoid(summary)]


def order(summary: Summary) -> list[Verdict]:
    """Judge the order 1 < same rate < raised rate, at the baseline's best and at 95% of it.

    >>> order(summarise(Result(Options(), (), 450, 10)))
    []
    """
    claim = "The paper's order, 1 < same rate < raised rate"
    rows = {row.variant: row for row in summary.rows}
    if not {BASELINE, SAME_RATE, RAISED_RATE} <= rows.keys():
        return []
    if summary.target is None:
        return [Verdict(claim, INCONCLUSIVE, "the baseline did not train, there is nothing to compare with")]
    if len(rows[BASELINE].accuracies) < FEWEST_SEEDS:
        return [Verdict(claim, INCONCLUSIVE, f"it takes {FEWEST_SEEDS} seeds or more to tell")]
    verdicts = []
    for target, baseline in (("best", summary.fastest_to_best), ("share", summary.fastest_to_share)):
        steps = {name: row.to_best if target == "best" else row.to_share for name, row in rows.items()}
        known = {name: value for name, value in steps.items() if value is not None}
        if baseline is not None:
            words = "the baseline's best" if target == "best" else f"{SHARE:.0%} of it"
            verdicts.append(order_to({**known, BASELINE: baseline.steps}, f"{claim}, to {words}"))
    return verdicts


def order_to(steps: Mapping[str, Steps], claim: str) -> Verdict:
    """Judge both links of the order for one target; rates raised still further are reported, not judged.

    >>> steps = {BASELINE: Steps((9, 9, 9)), SAME_RATE: Steps((4, 5, 6)), RAISED_RATE: Steps((1, 2, 3))}
    >>> order_to(steps, "1 < same rate < raised rate").outcome
    'confirmed'
    """
    links = [(SAME_RATE, BASELINE), (RAISED_RATE, SAME_RATE)]
    pairs = [*links, ("BN-x30", SAME_RATE)] if "BN-x30" in steps else links
    outcome = together([sooner(steps[a], steps[b]) for a, b in links])
    shares = [
        f"{a} before {b} in {chance_of_sooner(steps[a], steps[b]):.0%} of seed pairs: {sooner(steps[a], steps[b])}"
        for a, b in pairs
    ]
    return Verdict(claim, outcome, "; ".join(shares))


def sigmoid(summary: Summary) -> list[Verdict]:
    """Judge whether the sigmoid network trains with Batch Normalization and only with it.

    >>> sigmoid(summarise(Result(Options(), (), 450, 10)))
    []
    """
    lanes = {lane.variant: lane for lane in summary.result.lanes}
    if not {"BN-x5-Sigmoid", SIGMOID} <= lanes.keys():
        return []
    bar = TRAINED / summary.result.classes
    normed = [best_accuracy(curve) for curve in lanes["BN-x5-Sigmoid"].chosen]
    without = highest(lanes[SIGMOID])
    outcome = INCONCLUSIVE
    if without >= bar:
        outcome = REFUTED
    elif min(normed) >= bar and len(normed) >= FEWEST_SEEDS:
        outcome = CONFIRMED
    evidence = f"best {max(normed):.1%} with, {without:.1%} without at any rate tried"
    return [Verdict("A sigmoid network trains with Batch Normalization and not without", outcome, evidence)]


def highest(lane: Lane) -> float:
    """Give the best accuracy of any rate and seed.

    >>> highest(Lane("Sigmoid", (), 0.1, 1.0))
    0.0
    """
    return max((best_accuracy(curve) for curve in lane.curves), default=0.0)
