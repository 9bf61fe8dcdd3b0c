"""The running average of statistics lags behind a network that learns; exact statistics do not."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference, median
from batchnorm.lab.judge.trials import each
from batchnorm.lab.loop import Tick, drawn, fit, right, right_by_batch
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section
from batchnorm.transforms.calibrate import calibrate

SMALL, LARGE = 32, 256
RATE = 0.1  # at batches of 32, with momentum 0.9; in proportion to the batch, falling to 0 as a cosine
EARLY = 4  # epochs
FIRST = 200  # of the fresh seeds
WAYS = {"running average": "vermillion", "without its start": "orange", "precise": "blue", "own batch": "green"}
SAME = 0.01  # of error


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each batch size."""
    more = {"epochs": 40, "seeds": 15} if budget == "quick" else {"epochs": 100, "seeds": 20}
    return [{"batch": size, **more} for size in (SMALL, LARGE)]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one network for each seed; return its test errors at some epochs with each kind of statistics."""
    data = examples(sets.load("digits"), flat=True)
    size, epochs = options["batch"], options["epochs"]
    looks = sorted({EARLY, epochs, *(e for e in (1, 2, 8, 16, 32, 64) if e < epochs)})

    def one(seed: int, tick: Tick) -> list[dict[str, float]]:
        network, rows = Chain(seed), []
        every = len(data.train_labels) // size
        steps = epochs * every

        def after(step: int) -> None:
            if step % every == 0 and step // every in looks:
                rows.append(errors(network, data, size))

        def rate(done: int) -> float:
            return float(RATE * size / SMALL * (1 + math.cos(math.pi * done / steps)) / 2)

        stream = drawn(data.train_inputs, data.train_labels, seed=seed, size=size, steps=steps)
        fit(network, stream, rate=rate, tick=tick, after=after)
        return rows

    return {"epochs": looks, "seeds": each(range(FIRST, FIRST + options["seeds"]), one, recorder)}


def errors(network: nn.Module, data: Examples, size: int) -> dict[str, float]:
    """Return the test error with each kind of statistics; the network's own are left as they are."""
    x, y = data.validation_inputs, data.validation_labels
    precise, _ = calibrate(network, torch.split(data.train_inputs, size), progress=False)
    found = {
        "running average": right(network, x, y),
        "without its start": right(unbiased(network), x, y),
        "precise": right(precise, x, y),
        "own batch": right_by_batch(network, x, y, min(size, 128)),
    }
    return {way: 1 - accuracy for way, accuracy in found.items()}


def unbiased(network: nn.Module) -> nn.Module:
    """Return a copy whose running averages no longer contain the 0 and 1 that they began with, as in Adam.

    >>> import torch
    >>> layer = BatchNorm1d(1)
    >>> _ = layer(torch.tensor([[7.0], [7.0]]))
    >>> unbiased(layer).running_mean
    tensor([7.])
    """
    network = copy.deepcopy(network)
    for layer in network.modules():
        if isinstance(layer, BatchNorm1d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            assert layer.momentum is not None
            left = (1 - layer.momentum) ** int(layer.num_batches_tracked)  # the weight of the start
            layer.running_mean /= 1 - left
            layer.running_var.sub_(left).div_(1 - left)
    return network


def judge(parts: Sequence[Part]) -> Judgement:
    """The errors with the average, less its start, against those with precise statistics, early and late."""
    excess: dict[int, dict[int, list[float]]] = {}
    for part in parts:
        rows = zip(*part.result["seeds"], strict=True)
        excess[part.options["batch"]] = {
            epoch: [row["without its start"] - row["precise"] for row in own]
            for epoch, own in zip(part.result["epochs"], rows, strict=True)
        }
    late = max(excess[LARGE])
    early = excess[LARGE][EARLY]
    return judged(
        f"With batches of {LARGE} the running average costs {statistics.median(early):.1%} of accuracy after {EARLY} "
        f"epochs and {statistics.median(excess[LARGE][late]):.1%} after {late}; with batches of {SMALL}, "
        f"{statistics.median(excess[SMALL][EARLY]):.1%} after {EARLY}.",
        [
            median(f"error above precise, epoch {EARLY}, batches of {LARGE}", early, SAME, unit="%"),
            median(f"error above precise, epoch {late}", excess[LARGE][late], SAME, above=False, unit="%"),
            difference(f"the same at {EARLY}, {LARGE} less {SMALL}", early, excess[SMALL][EARLY], unit="%"),
        ],
        len(early),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Test error over epochs, a panel for each batch size and a line for each kind of statistics."""
    panels = []
    worst = max(max(row.values()) for part in parts for seed in part.result["seeds"] for row in seed)
    for part in sorted(parts, key=lambda part: -part.options["batch"]):
        early = 1 / (len(part.result["epochs"]) - 1) if part.options["batch"] == LARGE else 1.0  # where they differ
        rows = list(zip(*part.result["seeds"], strict=True))
        lines = [
            Line(
                way, part.result["epochs"], [statistics.median(r[way] for r in row) for row in rows], colour,
                low=[min(r[way] for r in row) for row in rows], high=[max(r[way] for r in row) for row in rows],
                named_at=early, nudge=22 if early < 1 and way == "own batch" else 0, opacity=0.12,
            )
            for way, colour in WAYS.items()
        ]  # fmt: skip
        title = f"test error, batches of {part.options['batch']}"
        panels.append(Panel(title, tuple(lines), "epoch", x_log=True, y_range=(0.0, worst), percent=True))
    sentence = "The same networks, normalised by four kinds of statistics: medians of the seeds and their span."
    return [Panels("Which statistics at test time", sentence, tuple(panels), columns=2, height=340)]


CLAIM = Claim(
    name="population",
    question="costs",
    title="The running average lags while a network learns; precise statistics do not",
    statement="Early in training with large batches a network is less accurate with its running average than with "
    "statistics recomputed for its present weights; when training has ended the two are alike.",
    source=Source(
        "Wu & Johnson 2021, section 3",
        "arXiv:2105.07576",
        "ResNet-50: the running average is worse before convergence and with batches of 8,192; at the end the same",
    ),
    rule="The running average is corrected for its start (0 and 1), so that only its lag counts. With batches of 256: "
    "confirmed if its error is surely more than 1 point above the precise one after 4 epochs, and more so than with "
    "batches of 32, and less than 1 point above it at the end; refuted if one of these is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three fully connected layers of 64 with BN on the bundled digits; SGD with momentum 0.9, the rate in "
    "proportion to the batch and falling to 0; averages of momentum 0.1, and batchnorm.calibrate on the training "
    "digits.",
    limits="An epoch of the digits is 5 large batches, so “early” is 20 steps, within the reach of the average (10 "
    "steps); on ImageNet the lag shows later, because networks change for longer.",
)
