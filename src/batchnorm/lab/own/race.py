"""The race of a user's network: both with the same grid of rates, chosen on tuning seeds, reported on fresh ones."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth.arms import PLAIN, TUNING_SEEDS, Arm, DepthSettings
from batchnorm.lab.depth.outcome import DepthEntry, choose_rate, smoothed, soonest_rate
from batchnorm.lab.depth.run import peak_megabytes
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.heat import Crew, Heat, Job, Watch, crew
from batchnorm.lab.own.subject import RaceSubject
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.summary import TRAINED, at_rate, typical_best
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train, train_apart

WITH = Arm("with BN")
LARGEST_PART = 12  # of any network: memory grows with the copies


@dataclass(frozen=True)
class Duel:
    """What the race of one network measured: both arms over the grid, and each at its rate on fresh seeds."""

    model: str
    settings: DepthSettings
    plain: DepthEntry | None
    normed: DepthEntry | None
    places: tuple[str, ...]
    alone: str
    classes: int
    validation_examples: int
    seconds: float
    peak_megabytes: float
    interrupted: bool = False


def run(
    model: str,
    subject: RaceSubject,
    settings: DepthSettings,
    *,
    threads: int = 1,
    watch: Watch | None = None,
    parts: Parts | None = None,
) -> Duel:
    """Race a network; an interrupt ends it and keeps an arm that was done.

    >>> run("net.py:make", load("net.py:make", "train.npz", [0], 32), DepthSettings())  # doctest: +SKIP
    """
    begun, interrupted = time.perf_counter(), False
    entries: dict[str, DepthEntry] = {}
    try:
        with crew(threads, watch, parts, planned(settings)) as workers:
            sweeps = {arm: sweep(workers, subject, settings, arm) for arm in (PLAIN, WITH)}
            for heat in sweeps.values():
                heat.wait()
            tuned = {arm: tuple(heat.curves()) for arm, heat in sweeps.items()}
            rates = {PLAIN: choose_rate(tuned[PLAIN], settings)}
            target = target_of(tuned[PLAIN], rates[PLAIN], settings)
            # Where the plain network stays near chance there is nothing to reach: the most accurate rate is chosen.
            sought = target if trained(target, subject.data.classes) else math.inf
            rates[WITH] = soonest_rate(tuned[WITH], sought, settings)
            fresh = {
                arm: start(workers, subject, settings, arm, [Member(rate, seed) for seed in range(settings.seeds)])
                for arm, rate in rates.items()
            }
            for arm, heat in fresh.items():
                heat.wait()
                entries[arm.name] = DepthEntry(0, arm.name, rates[arm], tuned[arm], tuple(heat.curves()))
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


def sweep(workers: Crew, subject: RaceSubject, settings: DepthSettings, arm: Arm) -> Heat:
    """Train one arm at all rates on the tuning seeds."""
    members = [Member(rate, seed) for seed in TUNING_SEEDS for rate in settings.rates]
    return start(workers, subject, settings, arm, members)


def planned(settings: DepthSettings) -> int:
    """Return how many steps of networks the race takes.

    >>> planned(DepthSettings(seeds=2, steps=10, rates=(0.1, 0.3)))
    160
    """
    return 2 * settings.steps * (len(TUNING_SEEDS) * len(settings.rates) + settings.seeds)


def start(workers: Crew, subject: RaceSubject, settings: DepthSettings, arm: Arm, members: Sequence[Member]) -> Heat:
    """Begin to train copies of the plain network or of the one with BN."""
    networks = subject.plain if arm is PLAIN else subject.normed
    job = Job(0, (arm,), tuple(members))
    amounts = {"steps": settings.steps, "batch_size": settings.batch_size, "every": settings.every}

    def train_part(part: Sequence[Member], look: Callable[[Progress], None]) -> list[Curve]:
        own: list[nn.Module] = [networks[member.seed] for member in part]
        if not subject.alone:
            return train(Copies(own), part, subject.data, watch=look, **amounts)
        return train_apart([copy.deepcopy(network) for network in own], part, subject.data, watch=look, **amounts)

    return workers.start(job, train_part, steps=settings.steps, largest=LARGEST_PART)


def target_of(tuning: Sequence[Curve], rate: float, settings: DepthSettings) -> float:
    """Return the best accuracy of a rate on the tuning seeds."""
    return typical_best([smoothed(curve, settings.smoothed_over) for curve in at_rate(tuning, rate)])


def trained(accuracy: float, classes: int) -> bool:
    """Whether an accuracy is far from chance: three times it, or with few classes half way from it to 1.

    >>> trained(0.2, classes=10), trained(0.8, classes=2)
    (False, True)
    """
    return accuracy >= min(TRAINED / classes, (1 + 1 / classes) / 2)
