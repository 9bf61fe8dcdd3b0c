"""The race of a user's network: both with the same grid of rates, chosen on tuning seeds, reported on fresh ones."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth.arms import PLAIN, TUNING_SEEDS, Arm, Settings
from batchnorm.lab.depth.claims import CLAIMS, NOT_JUDGED
from batchnorm.lab.depth.outcome import Entry, choose_rate, smoothed
from batchnorm.lab.depth.run import Job, Watch, peak_megabytes
from batchnorm.lab.depth.store import entry_records
from batchnorm.lab.ensemble import Copies, Single
from batchnorm.lab.heat import Crew, Heat, crew
from batchnorm.lab.own.subject import Subject
from batchnorm.lab.summary import TRAINED, Steps, at_rate, rates_in, steps_of, typical_best
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train
from batchnorm.lab.verdict import FEWEST_SEEDS, Verdict, sooner
from batchnorm.records import RecordFile

COMMAND = "race --model"
WITH = Arm("with BN")
LARGEST_PART = 12  # of any network: memory grows with the copies


@dataclass(frozen=True)
class Duel:
    """What the race of one network measured: both arms over the grid, and each at its rate on fresh seeds."""

    model: str
    settings: Settings
    plain: Entry | None
    normed: Entry | None
    places: tuple[str, ...]
    alone: str
    classes: int
    validation_examples: int
    seconds: float
    peak_megabytes: float
    interrupted: bool = False


def run(model: str, subject: Subject, settings: Settings, *, threads: int = 1, watch: Watch | None = None) -> Duel:
    """Race a network; an interrupt ends it and keeps an arm that was done.

    >>> run("net.py:make", load("net.py:make", "train.npz", [0], 32), Settings())  # doctest: +SKIP
    """
    begun, interrupted = time.perf_counter(), False
    entries: dict[str, Entry] = {}
    try:
        with crew(threads) as workers:
            sweeps = {arm: sweep(workers, subject, settings, arm, watch) for arm in (PLAIN, WITH)}
            for heat in sweeps.values():
                heat.wait()
            tuned = {arm: tuple(heat.curves()) for arm, heat in sweeps.items()}
            rates = {PLAIN: choose_rate(tuned[PLAIN], settings)}
            rates[WITH] = soonest_rate(tuned[WITH], target_of(tuned[PLAIN], rates[PLAIN], settings), settings)
            fresh = {
                arm: start(
                    workers, subject, settings, arm, [Member(rate, seed) for seed in range(settings.seeds)], watch
                )
                for arm, rate in rates.items()
            }
            for arm, heat in fresh.items():
                heat.wait()
                entries[arm.name] = Entry(0, arm.name, rates[arm], tuned[arm], tuple(heat.curves()))
    except KeyboardInterrupt:
        interrupts.accept()
        interrupted = True
    return Duel(
        model,
        settings,
        entries.get(PLAIN.name),
        entries.get(WITH.name),
        subject.places,
        subject.alone,
        subject.data.classes,
        len(subject.data.validation_labels),
        time.perf_counter() - begun,
        peak_megabytes(),
        interrupted,
    )


def sweep(workers: Crew, subject: Subject, settings: Settings, arm: Arm, watch: Watch | None) -> Heat:
    """Train one arm at all rates on the tuning seeds."""
    members = [Member(rate, seed) for seed in TUNING_SEEDS for rate in settings.rates]
    return start(workers, subject, settings, arm, members, watch)


def start(
    workers: Crew, subject: Subject, settings: Settings, arm: Arm, members: Sequence[Member], watch: Watch | None
) -> Heat:
    """Begin to train copies of the plain network or of the one with BN."""
    networks = subject.plain if arm is PLAIN else subject.normed
    job = Job(0, (arm,), tuple(members))
    amounts = {"steps": settings.steps, "batch_size": settings.batch_size, "every": settings.every}

    def train_part(part: Sequence[Member], look: Callable[[Progress], None]) -> list[Curve]:
        own: list[nn.Module] = [networks[member.seed] for member in part]
        if not subject.alone:
            return train(Copies(own), part, subject.data, watch=look, **amounts)
        curves: list[Curve] = []
        for network, member in zip(own, part, strict=True):
            curves += train(Single(copy.deepcopy(network)), [member], subject.data, watch=look, **amounts)
        return curves

    return workers.start(members, train_part, watch and (lambda progress: watch(job, progress)), largest=LARGEST_PART)


def target_of(tuning: Sequence[Curve], rate: float, settings: Settings) -> float:
    """Return the best accuracy of a rate on the tuning seeds."""
    return typical_best([smoothed(curve, settings.smoothed_over) for curve in at_rate(tuning, rate)])


def soonest_rate(tuning: Sequence[Curve], target: float, settings: Settings) -> float:
    """Choose the rate that reaches the target in the fewest steps; of equal ones the most accurate.

    >>> slow = Curve(Member(0.1, 0), (10, 20), (0.2, 0.9), (1.0, 1.0))
    >>> fast = Curve(Member(0.3, 0), (10, 20), (0.9, 0.9), (1.0, 1.0))
    >>> soonest_rate([slow, fast], 0.5, Settings(smoothed_over=1))
    0.3
    """
    curves = [smoothed(curve, settings.smoothed_over) for curve in tuning]

    def order(rate: float) -> tuple[float, float]:
        own = at_rate(curves, rate)
        return steps_of(own, target).median, -typical_best(own)

    return min(rates_in(curves), key=order)


def steps(duel: Duel) -> tuple[Steps, Steps, float] | None:
    """Return the steps without and with BN to the plain network's best, and that best; None if it did not train."""
    if duel.plain is None or duel.normed is None:
        return None
    window = duel.settings.smoothed_over
    plain, normed = ([smoothed(c, window) for c in entry.curves] for entry in (duel.plain, duel.normed))
    target = typical_best(plain)
    if target < min(TRAINED / duel.classes, (1 + 1 / duel.classes) / 2):  # with few classes, half way from chance
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
    if duel.settings.seeds < FEWEST_SEEDS:
        return Verdict(CLAIMS[0], NOT_JUDGED, f"it takes {FEWEST_SEEDS} seeds; {evidence}")
    return Verdict(CLAIMS[0], sooner(with_bn, without), evidence)


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
    """Say in one sentence what the race came to."""
    if duel.plain is None or duel.normed is None:
        return "No arm was finished."
    found = steps(duel)
    if found is None:
        return "Without Batch Normalization the network did not train at any rate tried: no ratio."
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
    for entry in (duel.plain, duel.normed):
        if entry is not None:
            best = typical_best([smoothed(curve, duel.settings.smoothed_over) for curve in entry.curves])
            lost = sum(curve.diverged_at is not None for curve in entry.curves)
            text.append(f"{entry.arm}: rate {entry.rate:g}, best {best:.1%}, {lost} of {len(entry.curves)} diverged")
    rows = sweep_rows(duel)
    if rows:
        text += ["", "Best accuracy at every rate (tuning seeds)", "  rate     without BN   with BN"]
        text += [f"  {rate:<8g} {a:>10.1%} {b:>9.1%}" for rate, a, b in rows]
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


def to_records(duel: Duel, threads: int) -> RecordFile:
    """Write a race as records: every curve, and the figures."""
    entries = [entry for entry in (duel.plain, duel.normed) if entry is not None]
    return RecordFile(
        COMMAND,
        {
            "model": duel.model,
            "settings": asdict(duel.settings),
            "threads": threads,
            "evaluated_at": entries[0].curves[0].steps if entries else (),
            "places": duel.places,
            "classes": duel.classes,
            "validation_examples": duel.validation_examples,
        },
        tuple(m for entry in entries for m in entry_records(entry)),
        {
            "sentence": sentence(duel),
            "lines": lines(duel),
            "claims": [asdict(verdict(duel))],
            "sweep": [{"rate": rate, "without": a, "with": b} for rate, a, b in sweep_rows(duel)],
            "seconds": duel.seconds,
            "interrupted": duel.interrupted,
        },
    )
