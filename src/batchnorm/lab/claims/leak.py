"""Batches sorted by class tell a network with Batch Normalization the answer, and evaluation takes it away."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.distributed.shuffle import shuffled
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference, median
from batchnorm.lab.judge.trials import at_every_rate, tuned
from batchnorm.lab.loop import Tick, fit, right
from batchnorm.lab.networks.conv_residual import ConvResidual
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.ghost import SplitBatchNorm
from batchnorm.layers.renorm import BatchRenorm
from batchnorm.layers.switches import use_batch_statistics
from batchnorm.report.sections import Bar, Headline, Section, Table
from batchnorm.transforms.calibrate import calibrate

DEVICES, SHARE = 4, 16  # so many groups of so many examples, each of one class, are a batch
RATES = (0.01, 0.03, 0.1)  # with momentum 0.9
ARMS = {
    "BN, a class a device": "vermillion",
    "shuffled": "blue",
    "synchronised": "green",
    "renorm": "purple",
    "group norm": "orange",
}
LEAKY, *REMEDIES = ARMS
COLLAPSE, RECOVERED = 0.2, 0.5  # of accuracy lost; share of the loss that a remedy has to recover


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    more = {"data": "digits", "steps": 100, "seeds": 9} if budget == "quick" else {
        "data": "fashion-mnist", "steps": 3000, "seeds": 10,
    }  # fmt: skip
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train on groups of one class; return accuracies of groups with their own statistics, and in evaluation."""
    data = examples(sets.load(options["data"]))
    arm, steps = options["arm"], options["steps"]

    def trial(rate: float, seed: int, data: Examples, tick: Tick) -> dict[str, Any]:
        network = network_of(arm, seed, data)
        forward = partial(shuffled, generator=torch.Generator().manual_seed(seed)) if arm == "shuffled" else run
        forward = apart if arm == "renorm" else forward
        fit(network, groups(data.train_inputs, data.train_labels, seed, steps), rate=rate, tick=tick,
            loss=partial(loss_of, forward))  # fmt: skip
        x, y = data.validation_inputs[:2000], data.validation_labels[:2000]
        better, size = network, DEVICES * SHARE
        if has_statistics(network):
            whole = min(len(data.train_inputs) // size, 256) * size
            better, _ = calibrate(network, torch.split(data.train_inputs[:whole], size), progress=False)
        return {"score": right(network, x, y), "grouped": grouped(network, x, y), "calibrated": right(better, x, y)}

    return tuned(trial, data, RATES, recorder, seeds=options["seeds"], tuning_seeds=(101, 102))


def network_of(arm: str, seed: int, data: Examples) -> nn.Module:
    """Return a network whose norm sees what a device sees; "synchronised" sees the whole batch."""
    norm: Any = {
        "synchronised": "batch",
        "renorm": partial(BatchRenorm, rmax=3.0, dmax=5.0, momentum=0.05),
        "group norm": "group",
    }.get(arm, partial(SplitBatchNorm, splits=DEVICES))
    return ConvResidual(seed, blocks=1, width=8, norm=norm, channels=data.train_inputs.shape[1], classes=data.classes)


def run(network: nn.Module, x: Tensor) -> Tensor:
    """Score the batch."""
    return cast(Tensor, network(x))


def apart(network: nn.Module, x: Tensor) -> Tensor:
    """Score the examples of each device by themselves."""
    return torch.cat([network(own) for own in torch.split(x, SHARE)])


def groups(x: Tensor, y: Tensor, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of groups, each of examples of one class, drawn with replacement; the classes are drawn too.

    >>> x, y = next(groups(torch.arange(20.0)[:, None], torch.arange(20) % 2, seed=0, steps=1))
    >>> x.shape, bool((y.view(DEVICES, SHARE) == y.view(DEVICES, SHARE)[:, :1]).all())
    (torch.Size([64, 1]), True)
    """
    stream = torch.Generator().manual_seed(seed)
    of_class = [torch.nonzero(y == label).flatten() for label in torch.unique(y)]
    for _ in range(steps):
        classes = torch.randint(len(of_class), (DEVICES,), generator=stream).tolist()
        drawn = [of_class[each][torch.randint(len(of_class[each]), (SHARE,), generator=stream)] for each in classes]
        index = torch.cat(drawn)
        yield x[index], y[index]


def loss_of(forward: Callable[[nn.Module, Tensor], Tensor], network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch; ``forward`` says who shares statistics with whom."""
    return F.cross_entropy(forward(network, x), y)


@torch.no_grad()
def grouped(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy of groups of one class, each normalised by its own statistics, as on a device in training."""
    network.eval()
    right_ones = count = 0
    with use_batch_statistics(network):
        for label in torch.unique(y):
            own = x[y == label]
            for start in range(0, len(own) - SHARE + 1, SHARE):
                part = own[start : start + SHARE]
                # SplitBatchNorm splits what it is given: a batch of copies has this group in every part.
                scores = network(part.repeat(DEVICES, 1, 1, 1))[:SHARE]
                right_ones += int((scores.argmax(1) == label).sum())
                count += SHARE
    return right_ones / count


def has_statistics(network: nn.Module) -> bool:
    """Whether a layer keeps running statistics."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


def judge(parts: Sequence[Part]) -> Judgement:
    """The collapse of the leaky arm, and what each remedy recovers of it."""
    fresh = {cast(str, part.options["arm"]): part.result["fresh"] for part in parts}
    score = {arm: [row["score"] for row in rows] for arm, rows in fresh.items()}
    own = [row["grouped"] for row in fresh[LEAKY]]
    estimates = [
        median("accuracy of groups of a class, own statistics", own, 0.9, unit="%"),
        difference("lost in evaluation", own, score[LEAKY], COLLAPSE, unit="%", paired=True),
    ]
    for arm in REMEDIES:
        shares = [
            (after - before) / (whole - before) if whole > before else float("nan")
            for after, before, whole in zip(score[arm], score[LEAKY], own, strict=True)
        ]
        estimates.append(median(f"share of it regained: {arm}", shares, RECOVERED, unit="%"))
    best = max(REMEDIES, key=lambda arm: statistics.median(score[arm]))
    return judged(
        f"With a class a device, accuracy is {statistics.median(own):.1%} by each group's own statistics and "
        f"{statistics.median(score[LEAKY]):.1%} in evaluation; {best} has {statistics.median(score[best]):.1%}.",
        estimates,
        len(own),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracy in evaluation of each arm, and that of the groups it was trained on."""
    bars, rows = [], []
    for part in parts:
        arm, fresh = part.options["arm"], part.result["fresh"]
        score, own, calibrated = (
            statistics.median(row[key] for row in fresh) for key in ("score", "grouped", "calibrated")
        )
        if arm == LEAKY:
            bars.append(Bar("groups of a class", own, f"{own:.1%}", "ink", "by the statistics of each group"))
        bars.append(Bar(arm, score, f"{score:.1%}", ARMS[arm]))
        rows.append(
            (
                arm,
                f"{part.result['rate']:g}",
                f"{own:.1%}",
                f"{score:.1%}",
                f"{calibrated:.1%}",
                at_every_rate(part.result["sweep"]),
            )
        )
    table = Table(
        "All arms", "Medians of the fresh seeds, each arm at its best rate.",
        ("arm", "rate", "groups, own statistics", "evaluation", "after calibrate", "each rate, tuning seeds"),
        tuple(rows), (1, 2, 3, 4),
    )  # fmt: skip
    sentence = "Test accuracy after training on batches in which every device has the examples of one class."
    return [Headline("The batch gives the answer away", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="leak",
    question="costs",
    title="BN reads the class off sorted batches; shuffling and others repair it",
    statement="If every device's examples have one class, a network with BN is right in training and fails in "
    "evaluation; shuffling, synchronising, Batch Renormalization and group norm each repair most of it.",
    source=Source(
        "Wu & Johnson 2021, section 6; He et al. 2020 (MoCo), section 3.3", "arXiv:2105.07576, arXiv:1911.05722"
    ),
    rule="Confirmed if groups of one class are surely right in more than 90% by their own statistics, evaluation "
    "surely loses more than 20 points of it, and each remedy surely regains more than half of that; refuted if one is "
    "surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Convolutional residual networks (3 blocks, 8 to 32 channels) on the bundled digits, batches of 4 groups of "
    "16 examples, each group of one class; three rates each, chosen by accuracy in evaluation. BN a group "
    "(SplitBatchNorm), the same with batchnorm.shuffled, BN over the batch, Batch Renormalization a group, group norm.",
    limits="How much evaluation loses differs widely between seeds; the arm that leaks is given the rate at which it "
    "loses least. Training is short: with time a network can rely on the leak more. Four simulated devices in one "
    "process; the accuracy of the groups is on test digits, also in groups of one class. Batches that are shuffled or "
    "synchronised have the examples of four classes at most. In fully connected layers, where BN leaves nothing of "
    "what a class has in common, networks do not learn such groups at all.",
    version=2,
)
