"""The five claims of the race, each judged by a rule that was written before it was run.

"Sooner" is the exact rank-sum test of `batchnorm.lab.verdict`, one-sided, at 5%. All judged seeds are fresh ones.

1. Batch Normalization needs fewer steps: the arm with BN that the tuning seeds chose is sooner than the plain network.
2. A raised rate is faster still, the order of the paper's Figure 3: BN x1 is sooner than the plain network, and BN x5
   sooner than BN x1. Refuted if either is refuted.
3. The plain network diverges at that rate, five times its best: confirmed if every seed diverges or never reaches
   three times chance, refuted if none does.
4. It grows with depth: the share of the plain network's steps that the chosen arm needs, seed by seed, is smaller at
   the deepest network that trains without BN than at the shallowest.
5. A scalar does it too: SkipInit is sooner than the plain network, and its median needs at most 1.5 times the steps
   of the chosen arm. Refuted if BN is sooner than SkipInit and SkipInit needs more than that.
"""

from __future__ import annotations

from batchnorm.lab.curves import NEVER, best_accuracy
from batchnorm.lab.depth.arms import PLAIN, RAISED_PLAIN, SKIP_INIT
from batchnorm.lab.depth.outcome import Depth, DepthOutcome, depth_of, depths_of, smoothed
from batchnorm.lab.summary import TRAINED, Steps
from batchnorm.lab.verdict import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_JUDGED,
    REFUTED,
    Verdict,
    chance_of_sooner,
    sooner,
    together,
    with_enough_seeds,
)

CLOSE = 1.5
CLAIMS = (
    "With Batch Normalization the network needs fewer steps",
    "A raised rate is faster still",
    "The plain network diverges at that rate",
    "The advantage grows with depth",
    "A learned scalar on every branch does it too",
)


def claims(outcome: DepthOutcome) -> list[Verdict]:
    """Judge the race: always five lines, in this order; those without enough seeds or data are not judged.

    >>> [verdict.outcome for verdict in claims(DepthOutcome(DepthSettings(), (), 10, 450))] == [NOT_JUDGED] * 5
    True
    """
    depth = depth_of(outcome, outcome.settings.headline)
    judged = (fewer_steps(depth), raised_rate(depth), divergence(outcome), growth(outcome), scalar(depth))
    return with_enough_seeds(CLAIMS, judged, outcome.settings.seeds)


def fewer_steps(depth: Depth | None) -> tuple[str, str]:
    """Judge the first claim.

    >>> fewer_steps(None)
    ('not judged', 'it was not run')
    """
    if depth is None or depth.fastest is None or depth.fastest not in depth.steps:
        return missing(depth)
    return compared(depth, depth.fastest, PLAIN.name)


def raised_rate(depth: Depth | None) -> tuple[str, str]:
    """Judge the second claim.

    >>> raised_rate(None)
    ('not judged', 'it was not run')
    """
    if depth is None or not {"BN x1", "BN x5"} <= depth.steps.keys():
        return missing(depth)
    links = [compared(depth, "BN x1", PLAIN.name), compared(depth, "BN x5", "BN x1")]
    evidence = "; ".join(f"{words}: {verdict}" for verdict, words in links)
    return together([verdict for verdict, _ in links]), evidence


def divergence(outcome: DepthOutcome) -> tuple[str, str]:
    """Judge the third claim.

    >>> divergence(DepthOutcome(DepthSettings(), (), 10, 450))
    ('not judged', 'it was not run')
    """
    entry = outcome.at(outcome.settings.headline).get(RAISED_PLAIN.name)
    if entry is None:
        return NOT_JUDGED, "it was not run"
    window, bar = outcome.settings.smoothed_over, TRAINED / outcome.classes
    lost = sum(curve.diverged_at is not None or best_accuracy(smoothed(curve, window)) < bar for curve in entry.curves)
    every = len(entry.curves)
    verdict = CONFIRMED if lost == every else REFUTED if lost == 0 else INCONCLUSIVE
    return verdict, f"{lost} of {every} seeds diverge or stay near chance at rate {entry.rate:g}"


def growth(outcome: DepthOutcome) -> tuple[str, str]:
    """Judge the fourth claim.

    >>> growth(DepthOutcome(DepthSettings(), (), 10, 450))
    ('not judged', 'it takes two depths at which the plain network trains')
    """
    shares = {depth.blocks: share_of_steps(outcome, depth) for depth in depths_of(outcome) if depth.fastest}
    known = {blocks: share for blocks, share in shares.items() if share is not None}
    if len(known) < 2:
        return NOT_JUDGED, "it takes two depths at which the plain network trains"
    shallow, deep = min(known), max(known)
    ratios = [
        f"{depth.ratio:.1f}x at {depth.blocks} blocks" if depth.ratio else f"no ratio at {depth.blocks} blocks"
        for depth in depths_of(outcome)
        if depth.blocks in known
    ]
    return sooner(known[deep], known[shallow]), ", ".join(ratios)


def share_of_steps(outcome: DepthOutcome, depth: Depth) -> Steps | None:
    """Return each seed's steps with BN as a share of the same seed's without; None if either was not run.

    A plain network that never arrives counts as if it did with its last step.
    """
    if depth.fastest is None or depth.fastest not in depth.steps:
        return None
    plain, normed = depth.steps[PLAIN.name].seeds, depth.steps[depth.fastest].seeds
    last = float(outcome.settings.steps)
    return Steps(tuple(b / (last if a == NEVER else a) for a, b in zip(plain, normed, strict=True)))


def scalar(depth: Depth | None) -> tuple[str, str]:
    """Judge the fifth claim.

    >>> scalar(None)
    ('not judged', 'it was not run')
    """
    if depth is None or depth.fastest is None or not {SKIP_INIT.name, depth.fastest} <= depth.steps.keys():
        return missing(depth)
    skip, normed, plain = (depth.steps[name] for name in (SKIP_INIT.name, depth.fastest, PLAIN.name))
    close = skip.median <= CLOSE * normed.median
    evidence = f"{SKIP_INIT.name} {words(skip)}, {depth.fastest} {words(normed)}, without either {words(plain)}"
    if close and sooner(skip, plain) == CONFIRMED:
        return CONFIRMED, evidence
    return (REFUTED if not close and sooner(normed, skip) == CONFIRMED else INCONCLUSIVE), evidence


def missing(depth: Depth | None) -> tuple[str, str]:
    """Say why a claim cannot be judged.

    >>> missing(None)
    ('not judged', 'it was not run')
    """
    trained = depth is None or depth.target is not None
    return NOT_JUDGED, "it was not run" if trained else "the plain network did not train"


def compared(depth: Depth, first: str, second: str) -> tuple[str, str]:
    """Judge whether one arm is sooner than another, with the figures."""
    a, b = depth.steps[first], depth.steps[second]
    pairs = f"sooner in {chance_of_sooner(a, b):.0%} of seed pairs"
    return sooner(a, b), f"{first} {words(a)}, {second} {words(b)}, {pairs}"


def words(steps: Steps) -> str:
    """Write a median of steps.

    >>> words(Steps((1200, 1400, 1300))), words(Steps((NEVER,)))
    ('1,300 steps', 'never')
    """
    return "never" if steps.median == NEVER else f"{steps.median:,.0f} steps"
