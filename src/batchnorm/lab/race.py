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

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data import digits
from batchnorm.lab.networks.inception import Inception, NormFactory, torch_norm
from batchnorm.lab.options import Options
from batchnorm.lab.summary import Lane, Result, best_rate
from batchnorm.lab.train import Progress, train
from batchnorm.lab.variants import SIGMOID, Variant, stacks

Watch = Callable[[Sequence[Variant], int, Progress], None]
"""Called after every step with the variants in training, how many networks they are and where they stand."""


def run(options: Options, *, watch: Watch | None = None, norm: NormFactory = torch_norm) -> Result:
    """Run the whole race; an interrupt ends it and keeps the variants that were done.

    >>> result = run(Options(seeds=3, steps=500))  # doctest: +SKIP
    >>> [lane.variant for lane in result.lanes]  # doctest: +SKIP
    ['Inception', 'BN-Baseline', 'BN-x5', 'BN-x30', 'BN-x5-Sigmoid', 'Sigmoid']
    """
    data = digits.load()
    if options.batch_size > len(data.train_labels):
        raise BatchNormError(
            f"--batch-size is {options.batch_size} but there are {len(data.train_labels)} images to train on",
            do="give a smaller number",
        )
    lanes: list[Lane] = []
    interrupted = False
    try:
        for stack in stacks():
            lanes += run_stack(stack, options, lanes, data, watch=watch, norm=norm)
    except KeyboardInterrupt:
        interrupted = True
    return Result(options, tuple(lanes), len(data.validation_labels), data.classes, interrupted)


def run_stack(
    stack: Sequence[Variant],
    options: Options,
    before: Sequence[Lane],
    data: digits.Split,
    *,
    watch: Watch | None = None,
    norm: NormFactory = torch_norm,
) -> list[Lane]:
    """Train variants that differ in learning rate only, all rates and seeds side by side.

    >>> lanes = run_stack([named("Inception")], Options(steps=100), [], digits.load())  # doctest: +SKIP
    """
    rates = {variant.name: rates_of(variant, options, before) for variant in stack}
    members = [
        Member(rate, seed)
        for variant in stack
        for rate in rates[variant.name]
        for seed in range(options.seeds)
    ]
    network = Inception(
        [member.seed for member in members],
        norm=norm if stack[0].normalised else None,
        activation=stack[0].activation,
        scheme=options.init,
        classes=data.classes,
    )
    begun = time.perf_counter()
    curves = train(
        network,
        members,
        data,
        steps=options.steps,
        batch_size=options.batch_size,
        every=options.every,
        watch=lambda progress: watch(stack, len(members), progress) if watch else None,
    )
    seconds = time.perf_counter() - begun
    return [
        Lane(variant.name, own, best_rate(own, data.classes), seconds, len(members))
        for variant, own in zip(
            stack, apart(curves, [len(rates[v.name]) * options.seeds for v in stack]), strict=True
        )
    ]


def rates_of(variant: Variant, options: Options, before: Sequence[Lane]) -> tuple[float, ...]:
    """Give the learning rates a variant trains at, knowing the lanes that are done.

    >>> rates_of(named("Inception"), Options(), [])
    (0.02, 0.05, 0.1, 0.2, 0.5)
    """
    if variant.factor is None:
        return options.sigmoid_rates if variant.name == SIGMOID else options.rates
    return (variant.factor * before[0].learning_rate,)


def apart(curves: Sequence[Curve], counts: Sequence[int]) -> list[tuple[Curve, ...]]:
    """Cut a stack's curves into those of its variants.

    >>> [len(part) for part in apart(["a", "b", "c"], [1, 2])]
    [1, 2]
    """
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [tuple(curves[end - count : end]) for end, count in zip(ends, counts, strict=True)]
