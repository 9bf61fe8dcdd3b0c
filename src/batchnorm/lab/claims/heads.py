"""A head that is shared by several scales needs statistics for each of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.judge.trials import tuned
from batchnorm.lab.loop import Tick, drawn, fit
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.networks.residual import he_linear
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.domain import DomainBatchNorm, use_domain
from batchnorm.report.sections import Bar, Headline, Section, Table

RATES = (0.01, 0.03, 0.1)  # with momentum 0.9
SCALES = ("fine", "coarse")
SHARED, EACH, JOINT = "one set, a batch a scale", "a set for each scale", "one set, scales in one batch"
ARMS = {SHARED: "vermillion", EACH: "blue", JOINT: "green"}
WORSE = 0.02  # of accuracy
WIDTH = 48


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    if budget == "quick":
        more = {"data": "digits", "steps": 200, "seeds": 7}
    else:
        more = {"data": "fashion-mnist", "steps": 5000, "seeds": 20}
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train on both scales; return the test accuracies by scale, and those with the statistics of each batch."""
    data = examples(sets.load(options["data"]))

    def trial(rate: float, seed: int, data: Examples, tick: Tick) -> dict[str, Any]:
        network = TwoScales(options["arm"], seed, data.train_inputs, data.classes)
        given = drawn(data.train_inputs, data.train_labels, seed=seed, size=32, steps=options["steps"])
        fit(network, given, rate=rate, loss=loss_of, tick=tick)
        return accuracies(network, data.validation_inputs[:2000], data.validation_labels[:2000])

    return tuned(trial, data, RATES, recorder, seeds=options["seeds"])


class TwoScales(nn.Module):
    """A layer of its own for each scale, then one head for both, as detectors have it."""

    def __init__(self, arm: str, seed: int, images: Tensor, classes: int = 10) -> None:
        """Draw the weights from the seed; the same ones in every arm."""
        super().__init__()
        self.arm = arm
        stream = torch.Generator().manual_seed(seed)
        sizes = [scale[0].numel() for scale in scales(images[:1])]
        self.laterals = nn.ModuleList(he_linear(stream, size, WIDTH, bias=True) for size in sizes)
        norm: Any = partial(DomainBatchNorm, domains=SCALES) if arm == EACH else "batch"
        self.head = Chain(seed, norm, inputs=WIDTH, widths=(WIDTH, WIDTH), classes=classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores at both scales: (scales, batch, classes)."""
        given = [torch.relu(lateral(own)) for lateral, own in zip(self.laterals, scales(x), strict=True)]
        if self.arm == JOINT:
            return cast(Tensor, self.head(torch.cat(given)).unflatten(0, (len(given), len(x))))
        return torch.stack([self._one(name, own) for name, own in zip(SCALES, given, strict=True)])

    def _one(self, name: str, x: Tensor) -> Tensor:
        if self.arm != EACH:
            return cast(Tensor, self.head(x))
        with use_domain(self.head, name):
            return cast(Tensor, self.head(x))


def scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and the same at half the size, flat; sums of four pixels, as a coarser grid sees them.

    >>> [tuple(own.shape) for own in scales(torch.zeros(3, 1, 8, 8))]
    [(3, 64), (3, 16)]
    """
    return x.flatten(1), 4 * F.avg_pool2d(x, 2).flatten(1)


def loss_of(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over both scales."""
    scores = network(x)
    return F.cross_entropy(scores.flatten(0, 1), y.repeat(len(scores)))


@torch.no_grad()
def accuracies(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return the accuracies in evaluation mode: their mean is the score."""
    found = (network.eval()(x).argmax(2) == y).double().mean(1).tolist()
    return {"score": statistics.fmean(found), "scales": found}


def judge(parts: Sequence[Part]) -> Judgement:
    """The accuracy with a set of statistics for each scale, less that with one set."""
    score = {cast(str, part.options["arm"]): [row["score"] for row in part.result["fresh"]] for part in parts}
    middle = {arm: statistics.median(own) for arm, own in score.items()}
    return judged(
        f"In evaluation a shared head is right in {middle[SHARED]:.1%} with one set of statistics from separate "
        "batches, in "
        f"{middle[EACH]:.1%} with a set for each scale, in {middle[JOINT]:.1%} with one set from joint batches.",
        [difference("accuracy, a set for each less one set", score[EACH], score[SHARED], WORSE, unit="%")],
        len(score[EACH]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracies of all arms, and those of each scale."""
    bars, rows = [], []
    for part in parts:
        arm, fresh = part.options["arm"], part.result["fresh"]
        score = statistics.median(row["score"] for row in fresh)
        bars.append(Bar(arm, score, f"{score:.1%}", ARMS[arm]))
        own = [f"{statistics.median(row['scales'][place] for row in fresh):.1%}" for place in range(len(SCALES))]
        rows.append((arm, f"{part.result['rate']:g}", *own))
    table = Table("By scale", "Medians of the fresh seeds.", ("statistics", "rate", *SCALES), tuple(rows), (1, 2, 3))
    sentence = "Test accuracy of a head that is shared by two scales, in evaluation mode, the mean of both."
    return [Headline("One head, two scales", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="heads",
    question="costs",
    title="A head shared by scales needs statistics for each",
    statement="A head with BN that is applied to two scales in turn and keeps one set of running statistics is less "
    "accurate in evaluation than one that keeps a set for each scale.",
    source=Source(
        "Wu & Johnson 2021, section 5.3",
        "arXiv:2105.07576",
        "RetinaNet: a shared head fails if it normalises by level in training and by one set of statistics in testing",
    ),
    rule="Confirmed if the accuracy with a set for each scale is surely more than 2 points higher; refuted if it "
    "surely is not.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="The bundled digits at 8 x 8 and at 4 x 4, a layer for each scale, one head of two layers of 48; gamma and "
    "beta are shared in every arm; three rates for each arm, chosen by accuracy in evaluation.",
    limits="Two scales of small images; what counts is that training and evaluation normalise alike, which a joint "
    "batch gives too.",
)
