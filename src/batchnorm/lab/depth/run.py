"""The race of residual networks: Figures 2 and 3 of the paper where the plain network cannot bear a raised rate.

The protocol. At each depth the network without Batch Normalization trains at every rate of a grid on three tuning
seeds, and its best rate is chosen. On fresh seeds it then trains at that rate, and the networks with BN at 1, 5 and
30 times that rate. SkipInit and gradient clipping choose from the same grid on the same tuning seeds. The tuning
seeds also choose the arm with BN that the first sentence quotes: of three rates, where the plain network had nine.
Plain SGD, batches of 32, no momentum, decay or schedule.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data import digits, sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.depth.arms import (
    MEDIUM,
    NORMALISED,
    PLAIN,
    RAISED_PLAIN,
    SIGMOID,
    SMALL,
    SOONEST,
    STAGES,
    SWEPT,
    TUNING_SEEDS,
    Arm,
    DepthSettings,
)
from batchnorm.lab.depth.outcome import DepthEntry, DepthOutcome, choose_rate, smoothed, soonest_rate, trains
from batchnorm.lab.heat import Crew, Heat, Job, Watch, crew
from batchnorm.lab.networks.conv_residual import ConvResidual
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.summary import at_rate, typical_best
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train, train_apart

FIRST_PART, LARGEST_PART = 14, 30  # copies that one thread trains together: small while others would wait
VALIDATED = 1000  # images: more would take longer than the training between two validations
LARGEST_APART = 3  # convolutional networks that one thread trains before they are kept


def digits_examples(dtype: torch.dtype = torch.float32) -> Examples:
    """Return the bundled digits, each a row of 64 values.

    >>> digits_examples().train_inputs.shape
    torch.Size([1347, 64])
    """
    split = digits.load()
    images = [torch.from_numpy(part).flatten(1).to(dtype) for part in (split.train_images, split.validation_images)]
    labels = [torch.from_numpy(part) for part in (split.train_labels, split.validation_labels)]
    return Examples(images[0], labels[0], images[1], labels[1], split.classes)


def fashion_examples() -> Examples:
    """Return Fashion-MNIST's training images, of which 1,000 are held out for validation; the folder is BATCHNORM_DATA.

    Test images are not read: rates are chosen, and arms compared, on the images that are held out.
    """
    found = examples(sets.load("fashion-mnist"), held_out=True)
    inputs, labels = found.validation_inputs, found.validation_labels
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:VALIDATED]
    return replace(found, validation_inputs=inputs[chosen], validation_labels=labels[chosen])


def examples_for(settings: DepthSettings) -> Examples:
    """Return what a race of this size reads.

    >>> len(examples_for(DepthSettings()).train_labels)
    1347
    """
    return digits_examples() if settings.size == SMALL else fashion_examples()


@dataclass
class Race:
    """A race under way: what was begun, and the entries that are done."""

    settings: DepthSettings
    data: Examples
    workers: Crew
    begun: list[tuple[Job, Heat]] = field(default_factory=list)

    def start(self, blocks: int, arms: Sequence[Arm], members: Sequence[Member], largest: int = LARGEST_PART) -> Heat:
        """Begin to train; the networks of all arms must be built alike."""
        settings, arm = self.settings, arms[0]
        largest = largest if settings.size == SMALL else LARGEST_APART
        job = Job(blocks, tuple(arms), tuple(members))

        def train_part(part: Sequence[Member], look: Callable[[Progress], None]) -> list[Curve]:
            shape: dict[str, Any] = {"width": settings.width, "skip_init": arm.skip_init, "classes": self.data.classes}
            amounts = {"steps": settings.steps, "batch_size": settings.batch_size, "every": settings.every}
            if settings.size == MEDIUM:
                norm = "batch" if arm.norm == "ours" else arm.norm
                large = [ConvResidual(m.seed, blocks=blocks // STAGES, norm=norm, **shape) for m in part]
                return train_apart(large, part, self.data, watch=look, **amounts)
            inputs = self.data.train_inputs.shape[1]
            own: dict[str, Any] = {"blocks": blocks, "norm": arm.norm, "activation": arm.activation, "inputs": inputs}
            networks = [Residual(member.seed, **own, **shape) for member in part]
            return train(ResidualCopies(networks), part, self.data, watch=look, **amounts)

        heat = self.workers.start(job, train_part, steps=settings.steps, largest=largest)
        self.begun.append((job, heat))
        return heat

    def member(self, rate: float, seed: int, arm: Arm) -> Member:
        """Return one network of an arm."""
        return Member(rate, seed, self.settings.momentum, clip=arm.clip)

    def sweep(self, blocks: int, arm: Arm, largest: int = LARGEST_PART) -> Heat:
        """Train an arm at all rates of its grid on the tuning seeds."""
        rates = self.settings.sigmoid_rates if arm.activation == "sigmoid" else self.settings.rates
        # Seed by seed: the parts into which this is cut have as many rates that diverge soon.
        members = [self.member(rate, seed, arm) for seed in TUNING_SEEDS for rate in rates]
        return self.start(blocks, [arm], members, largest)

    def report(self, blocks: int, arm: Arm, rate: float) -> Heat:
        """Train an arm at one rate on fresh seeds."""
        return self.start(blocks, [arm], [self.member(rate, seed, arm) for seed in range(self.settings.seeds)])

    def searched(self, blocks: int, rate: float, tuning: Sequence[Curve]) -> list[Heat]:
        """Train the plain network at the rates that are soonest at each target on the tuning seeds, if others."""
        if not self.settings.strict:
            return []
        own = [smoothed(curve, self.settings.smoothed_over) for curve in at_rate(tuning, rate)]
        best = typical_best(own)
        soonest = {arm: soonest_rate(tuning, share * best, self.settings) for share, arm in SOONEST.items()}
        return [self.report(blocks, arm, other) for arm, other in soonest.items() if other != rate]

    def normalised(self, blocks: int, rate: float, largest: int = LARGEST_PART) -> Heat:
        """Train the network with BN at 1, 5 and 30 times a rate, on the tuning seeds and on fresh ones."""
        seeds = (*TUNING_SEEDS, *range(self.settings.seeds))
        members = [self.member(raised(rate, arm), seed, arm) for arm in NORMALISED for seed in seeds]
        return self.start(blocks, NORMALISED, members, largest)

    def entries(self) -> list[DepthEntry]:
        """The entries of all arms of which every network is trained."""
        tuned: dict[tuple[int, str], list[Curve]] = {}
        fresh: dict[tuple[int, str], list[Curve]] = {}
        for job, heat in self.begun:
            for curve in heat.curves() if heat.finished else ():
                seed, rate = curve.member.seed, curve.member.learning_rate
                place = tuned if seed in TUNING_SEEDS else fresh
                for arm in job.arms:
                    if len(job.arms) == 1 or rate == raised(job.members[0].learning_rate, arm):
                        place.setdefault((job.blocks, arm.name), []).append(curve)
        order = [arm.name for arm in (PLAIN, *NORMALISED, *SWEPT, SIGMOID, RAISED_PLAIN, *SOONEST.values())]
        return [
            DepthEntry(blocks, name, own[0].member.learning_rate, tuple(tuned.get((blocks, name), ())), tuple(own))
            for (blocks, name), own in sorted(fresh.items(), key=lambda item: (item[0][0], order.index(item[0][1])))
        ]


def raised(rate: float, arm: Arm) -> float:
    """Return an arm's learning rate: a multiple of the plain network's, without digits that mean nothing.

    >>> raised(0.003, NORMALISED[2])
    0.09
    """
    return float(f"{rate * (arm.factor or 1):.6g}")


def run(
    settings: DepthSettings,
    *,
    threads: int = 1,
    watch: Watch | None = None,
    answer: Callable[[DepthOutcome], None] = lambda outcome: None,
    parts: Parts | None = None,
) -> DepthOutcome:
    """Run the race; ``answer`` is called as soon as the depth of the first sentence is known.

    >>> outcome = run(DepthSettings(seeds=1, steps=100, depths=(2,)))  # doctest: +SKIP

    An interrupt ends it and keeps the arms that were done; ``parts`` that are there are not trained again.
    """
    data, begun, processor = examples_for(settings), time.perf_counter(), time.process_time()
    interrupted = False
    race = None

    def outcome() -> DepthOutcome:
        return DepthOutcome(
            settings,
            tuple(race.entries()) if race is not None else (),
            data.classes,
            len(data.validation_labels),
            time.perf_counter() - begun,
            time.process_time() - processor,
            peak_megabytes(),
            interrupted,
        )

    try:
        with crew(threads, watch, parts, planned(settings)) as workers:
            race = Race(settings, data, workers)
            follow(race, lambda: answer(outcome()))
    except KeyboardInterrupt:
        interrupts.accept()
        interrupted = True
    return outcome()


def follow(race: Race, answer: Callable[[], None]) -> None:
    """Start everything in the order in which it is wanted, and wait for it.

    >>> follow(race, lambda: None)  # doctest: +SKIP
    """
    settings, first = race.settings, race.settings.headline
    sweep = race.sweep(first, PLAIN, FIRST_PART)
    sweep.wait()
    rate = choose_rate(sweep.curves(), settings)
    awaited = [race.report(first, PLAIN, rate), race.normalised(first, rate, FIRST_PART)]
    awaited += race.searched(first, rate, sweep.curves())
    others = sorted((depth for depth in settings.depths if depth != first), reverse=True)
    sweeps = [(first, arm, race.sweep(first, arm)) for arm in settings.swept]
    race.report(first, RAISED_PLAIN, raised(rate, RAISED_PLAIN))
    if settings.size == SMALL:
        race.report(first, SIGMOID, raised(rate, SIGMOID))
    sweeps += [(depth, PLAIN, race.sweep(depth, PLAIN)) for depth in others]
    for heat in awaited:
        heat.wait()
    answer()
    for blocks, arm, heat in sweeps:
        heat.wait()
        rate = choose_rate(heat.curves(), settings)
        race.report(blocks, arm, rate)
        if arm is PLAIN:
            race.searched(blocks, rate, heat.curves())
        if arm is PLAIN and trains(heat.curves(), settings, race.data.classes):
            race.normalised(blocks, rate)
        elif arm is PLAIN:  # there is no ratio: one arm shows whether BN trains
            race.report(blocks, NORMALISED[-1], raised(rate, NORMALISED[-1]))
    for _, heat in race.begun:
        heat.wait()


def planned(settings: DepthSettings) -> int:
    """Return how many steps of networks the whole race takes, each weighted by its depth.

    >>> planned(DepthSettings(seeds=1, steps=10, depths=(2,), rates=(0.1,), sigmoid_rates=(0.1,))) > 0
    True
    """
    tuning, seeds = len(TUNING_SEEDS), settings.seeds
    sweep = tuning * len(settings.rates) + seeds
    own = sweep + len(NORMALISED) * (tuning + seeds) + settings.strict * len(SOONEST) * seeds
    sigmoids = tuning * len(settings.sigmoid_rates) + 2 * seeds if settings.size == SMALL else 0
    beside = 2 * sweep + sigmoids + seeds
    return settings.steps * (own * sum(settings.depths) + beside * settings.headline)


def peak_megabytes() -> float:
    """Return the most memory that this process ever had.

    >>> peak_megabytes() > 10
    True
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)
