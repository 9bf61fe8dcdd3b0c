"""The race: Figures 2 and 3 of the Batch Normalization paper at the size of a desk.

The protocol. Every network has the same four blocks, the same initial scheme, plain SGD without momentum,
decay or schedule, the same number of steps and the same seeds; a seed fixes the order of the examples.

1. The network without Batch Normalization trains at every learning rate of a grid. Its best rate is the one
   with the highest median, over the seeds, of the best validation accuracy; of equal ones, the soonest there.
   Choosing on the figures that are then reported flatters the baseline, which is the side to err on.
2. With Batch Normalization it trains at 1, 5 and 30 times that rate, and as a sigmoid network at 5 times.
3. The sigmoid network without Batch Normalization trains at a wide grid of its own.

The baseline's best accuracy is where it ends, so its steps to that grow with the length of the race, as they
do in the paper. Steps to 95% of it hardly depend on the length: read both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data import digits
from batchnorm.lab.heat import Crew, Heat, Job, Watch, crew
from batchnorm.lab.networks.inception import Inception, NormFactory, our_norm
from batchnorm.lab.options import Options
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.summary import Lane, Result, best_rate
from batchnorm.lab.train import Progress, train
from batchnorm.lab.variants import BASELINE, SIGMOID, VARIANTS, Variant, stacks

NAN = float("nan")


def run(
    options: Options,
    *,
    threads: int = 1,
    watch: Watch | None = None,
    norm: NormFactory = our_norm,
    parts: Parts | None = None,
) -> Result:
    """Run the whole race; an interrupt ends it and keeps the variants that were done.

    >>> result = run(Options(steps=500))  # doctest: +SKIP
    >>> [lane.variant for lane in result.lanes]  # doctest: +SKIP
    ['Inception', 'BN-Baseline', 'BN-x5', 'BN-x30', 'BN-x5-Sigmoid', 'Sigmoid']
    """
    data = digits.load()
    begun = time.perf_counter()
    baseline, *others = stacks()
    heats: dict[Sequence[Variant], Heat] = {}
    interrupted = False
    try:
        with crew(threads, watch, parts, planned(options)) as workers:

            def begin(stack: Sequence[Variant], rate: float) -> None:
                heats[stack] = start(workers, stack, options, rate, data, norm)

            begin(baseline, NAN)
            for stack in others:
                if stack[0].factor is None:  # it sweeps rates of its own: no need to wait
                    begin(stack, NAN)
            heats[baseline].wait()
            best = best_rate(heats[baseline].curves(), data.classes)
            for stack in others:
                if stack[0].factor is not None:
                    begin(stack, best)
            for heat in heats.values():
                heat.wait()
    except KeyboardInterrupt:
        interrupts.accept()
        interrupted = True
    done = [stack for stack in stacks() if stack in heats and heats[stack].finished]
    lanes = tuple(lane for stack in done for lane in lanes_of(stack, heats[stack], data.classes))
    seconds = time.perf_counter() - begun
    return Result(options, lanes, len(data.validation_labels), data.classes, seconds, interrupted)


def start(
    workers: Crew,
    stack: Sequence[Variant],
    options: Options,
    baseline_rate: float,
    data: digits.Split,
    norm: NormFactory = our_norm,
) -> Heat:
    """Begin to train variants that differ in learning rate only, all rates and seeds side by side.

    >>> heat = start(workers, [named("BN-x5")], Options(), 0.1, digits.load())  # doctest: +SKIP
    """
    members = tuple(
        Member(rate, seed)
        for variant in stack
        for rate in rates_of(variant, options, baseline_rate)
        for seed in range(options.seeds)
    )

    def train_part(part: Sequence[Member], look: Callable[[Progress], None]) -> list[Curve]:
        network = Inception(
            [member.seed for member in part],
            norm=norm if stack[0].normalised else None,
            activation=stack[0].activation,
            scheme=options.init,
            classes=data.classes,
        )
        amounts = {"steps": options.steps, "batch_size": options.batch_size, "every": options.every}
        return train(network, part, data, watch=look, **amounts)

    return workers.start(Job(0, tuple(stack), members), train_part, steps=options.steps)


def lanes_of(stack: Sequence[Variant], heat: Heat, classes: int) -> list[Lane]:
    """Cut a finished stack into its variants, each with an equal share of the members.

    >>> lanes_of([named("BN-x5"), named("BN-x30")], heat, classes=10)  # doctest: +SKIP
    """
    curves, share = heat.curves(), len(heat.members) // len(stack)
    own = [tuple(curves[index * share : (index + 1) * share]) for index in range(len(stack))]
    seconds = heat.core_seconds() / len(heat.members)
    return [
        Lane(variant.name, part, best_rate(part, classes), seconds) for variant, part in zip(stack, own, strict=True)
    ]


def rates_of(variant: Variant, options: Options, baseline_rate: float) -> tuple[float, ...]:
    """Give the learning rates a variant trains at.

    >>> rates_of(named("BN-x5"), Options(), baseline_rate=0.1)
    (0.5,)
    """
    if variant.factor is None:
        return options.sigmoid_rates if variant.name == SIGMOID else options.rates
    return (variant.factor * baseline_rate,)


def planned(options: Options) -> int:
    """Return how many steps of networks the whole race takes.

    >>> planned(Options(seeds=1, steps=10, rates=(0.1, 0.2), sigmoid_rates=(0.3,)))
    70
    """
    rates = {BASELINE: options.rates, SIGMOID: options.sigmoid_rates}
    return options.steps * options.seeds * sum(len(rates.get(variant.name, (0.0,))) for variant in VARIANTS)
