"""Whether the paper's claims held in this run: confirmed, refuted or inconclusive, by a fixed rule.

One variant is sooner than another when, drawing a seed of each, it needs fewer steps at least four times in
five (a tie counts half). It is later when that happens at most once in five. Else it is inconclusive,
and so is everything from fewer than three seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchnorm.lab.curves import best_accuracy
from batchnorm.lab.summary import SHARE, TRAINED, Lane, Steps, Summary
from batchnorm.lab.variants import BASELINE, RAISED_RATE, SAME_RATE, SIGMOID

CONFIRMED, REFUTED, INCONCLUSIVE = "confirmed", "refuted", "inconclusive"
SURE = 0.8
FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Verdict:
    """A claim, what became of it, and the evidence in a few words."""

    claim: str
    outcome: str
    evidence: str


def chance_of_sooner(first: Steps, second: Steps) -> float:
    """Give the share of pairs of seeds in which the first was sooner; a tie counts half.

    >>> chance_of_sooner(Steps((10, 30)), Steps((20, 30)))
    0.625
    """
    pairs = [(a, b) for a in first.seeds for b in second.seeds]
    return sum(1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def sooner(first: Steps, second: Steps) -> str:
    """Judge whether the first needs fewer steps than the second.

    >>> sooner(Steps((10, 20, 30)), Steps((40, 50, 60)))
    'confirmed'
    """
    if min(len(first.seeds), len(second.seeds)) < FEWEST_SEEDS:
        return INCONCLUSIVE
    chance = chance_of_sooner(first, second)
    return CONFIRMED if chance >= SURE else REFUTED if chance <= 1 - SURE else INCONCLUSIVE


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
    """Judge both links of the order for one target; rates raised still further are told, not judged.

    >>> steps = {BASELINE: Steps((9, 9, 9)), SAME_RATE: Steps((4, 5, 6)), RAISED_RATE: Steps((1, 2, 3))}
    >>> order_to(steps, "1 < same rate < raised rate").outcome
    'confirmed'
    """
    links = [(SAME_RATE, BASELINE), (RAISED_RATE, SAME_RATE)]
    told = [*links, ("BN-x30", SAME_RATE)] if "BN-x30" in steps else links
    shares = [f"{a} before {b} in {chance_of_sooner(steps[a], steps[b]):.0%}" for a, b in told]
    outcome = together([sooner(steps[a], steps[b]) for a, b in links])
    return Verdict(claim, outcome, f"{', '.join(shares)} of seed pairs")


def sigmoid(summary: Summary) -> list[Verdict]:
    """Judge whether the sigmoid network trains with Batch Normalization and only with it.

    >>> sigmoid(summarise(Result(Options(), (), 450, 10)))
    []
    """
    lanes = {lane.variant: lane for lane in summary.result.lanes}
    if not {"BN-x5-Sigmoid", SIGMOID} <= lanes.keys():
        return []
    bar = TRAINED / summary.result.classes
    with_bn, without = highest(lanes["BN-x5-Sigmoid"]), highest(lanes[SIGMOID])
    lowest_with = min(best_accuracy(curve) for curve in lanes["BN-x5-Sigmoid"].chosen)
    outcomes = [CONFIRMED if lowest_with >= bar else REFUTED, CONFIRMED if without < bar else REFUTED]
    evidence = f"best {with_bn:.1%} with, {without:.1%} without at any rate tried"
    return [Verdict("A sigmoid network trains with Batch Normalization and not without", together(outcomes), evidence)]


def highest(lane: Lane) -> float:
    """Give the best accuracy of any rate and seed.

    >>> highest(Lane("Sigmoid", (), 0.1, 1.0))
    0.0
    """
    return max((best_accuracy(curve) for curve in lane.curves), default=0.0)
