"""What the race of a user's network came to: the verdict, and the lines of the terminal."""

from __future__ import annotations

import math

from batchnorm.lab.depth.claims import CLAIMS
from batchnorm.lab.depth.outcome import DepthEntry, smoothed
from batchnorm.lab.own.race import Duel, trained
from batchnorm.lab.summary import Steps, at_rate, rates_in, steps_of, typical_best
from batchnorm.lab.verdict import NOT_JUDGED, Verdict, sooner, with_enough_seeds


def steps(duel: Duel) -> tuple[Steps, Steps, float] | None:
    """Return the steps without and with BN to the plain network's best, and that best; None if it did not train."""
    if duel.plain is None or duel.normed is None:
        return None
    window = duel.settings.smoothed_over
    plain, normed = ([smoothed(c, window) for c in entry.curves] for entry in (duel.plain, duel.normed))
    target = typical_best(plain)
    if not trained(target, duel.classes):
        return None
    without = steps_of(plain, target)
    return without, steps_of(normed, target, without.median), target


def verdict(duel: Duel) -> Verdict:
    """Judge whether BN needs fewer steps: the exact rank-sum test on the fresh seeds."""
    found = steps(duel)
    if found is None:
        return Verdict(CLAIMS[0], NOT_JUDGED, "the plain network did not train, or was not finished")
    without, with_bn, _ = found
    evidence = f"medians {without.median:g} without and {with_bn.median:g} with"
    return with_enough_seeds(CLAIMS[:1], [(sooner(with_bn, without), evidence)], duel.settings.seeds)[0]


def sweep_rows(duel: Duel) -> list[tuple[float, float, float]]:
    """Return each rate of the grid with the median best accuracy of the tuning seeds, without and with BN."""
    if duel.plain is None or duel.normed is None:
        return []
    columns = []
    for entry in (duel.plain, duel.normed):
        curves = [smoothed(curve, duel.settings.smoothed_over) for curve in entry.tuning]
        columns.append({rate: typical_best(at_rate(curves, rate)) for rate in rates_in(curves)})
    return [(rate, columns[0][rate], columns[1][rate]) for rate in columns[0]]


def sentence(duel: Duel) -> str:
    """Say in one sentence what the race came to.

    >>> sentence(Duel("net.py:make", DepthSettings(), None, None, (), "", 10, 450, 2.0, 300.0))
    'No arm was finished.'
    """
    if duel.plain is None or duel.normed is None:
        return "No arm was finished."
    found = steps(duel)
    if found is None:
        plain, normed = (best(duel, entry) for entry in (duel.plain, duel.normed))
        return f"Without Batch Normalization the network does not train ({plain:.1%} at best); with it {normed:.1%}."
    without, with_bn, _ = found
    if with_bn.median == math.inf:
        return f"With Batch Normalization: never. Without: {without.median:,.0f} steps."
    ratio = with_bn.ratio or math.nan
    much = f"{ratio:.1f}x fewer" if ratio >= 1 else f"{1 / ratio:.1f}x more"
    return f"With Batch Normalization: {with_bn.median:,.0f} steps. Without: {without.median:,.0f}. {much}."


def lines(duel: Duel) -> list[str]:
    """Write the whole race: the sentence, the verdict, both arms, the sweep, the notes."""
    text = [sentence(duel)]
    found = steps(duel)
    judged = verdict(duel)
    if found is not None:
        text.append(f"Steps to {found[2]:.1%}, the best without BN at its own best rate; medians of fresh seeds.")
    text.append(f"{judged.claim}: {judged.outcome.upper()} ({judged.evidence}).")
    text += [arm(duel, entry) for entry in (duel.plain, duel.normed) if entry is not None]
    rows = sweep_rows(duel)
    if rows:
        text += ["", "Best accuracy at every rate (tuning seeds)", "  rate     without BN   with BN"]
        text += [f"  {rate:<8g} {a:>10.1%} {b:>9.1%}" for rate, a, b in rows]
    return text + notes(duel)


def arm(duel: Duel, entry: DepthEntry) -> str:
    """Describe one arm on the fresh seeds."""
    lost = sum(curve.diverged_at is not None for curve in entry.curves)
    return f"{entry.arm}: rate {entry.rate:g}, best {best(duel, entry):.1%}, {lost} of {len(entry.curves)} diverged"


def best(duel: Duel, entry: DepthEntry) -> float:
    """Return the median of an arm's best accuracies on the fresh seeds."""
    return typical_best([smoothed(curve, duel.settings.smoothed_over) for curve in entry.curves])


def notes(duel: Duel) -> list[str]:
    """Write what to beware of, where BN was inserted, and what the race took.

    >>> notes(Duel("net.py:make", DepthSettings(), None, None, ("1", "4"), "", 10, 450, 2.0, 300.0))[0]
    'BN was inserted behind 1, 4.'
    """
    text = []
    for entry in (duel.plain, duel.normed):
        if entry is not None and entry.rate in (duel.settings.rates[0], duel.settings.rates[-1]):
            text.append(f"{entry.arm}: its rate, {entry.rate:g}, is at the end of the grid; widen --rates.")
    text.append(f"BN was inserted behind {', '.join(duel.places)}.")
    if duel.alone:
        text.append(f"Copies were trained one by one ({duel.alone}).")
    if duel.interrupted:
        text.append("Interrupted: only what was finished is shown.")
    text.append(
        f"{duel.settings.steps} steps, validated on {duel.validation_examples} examples, in {duel.seconds:.0f} s; "
        f"peak memory {duel.peak_megabytes:.0f} MB."
    )
    return text
