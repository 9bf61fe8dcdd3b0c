"""At initialisation, Batch Normalization without skip connections makes gradients explode with depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.judge.spans import span_line
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section

THEORY = math.pi / (math.pi - 1)  # 1.467 a layer
AROUND = 0.05  # of the factor, as a share
FLAT = math.sqrt(THEORY)  # at most half of the growth, in logarithms
SETTLED = 10  # layers until the batch has the geometry to which it converges
PLAIN, SKIPS, NONE = "BN, no skips", "BN, skips", "no BN, no skips"
COLORS = {PLAIN: "blue", SKIPS: "green", NONE: "vermillion"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    quick = {"depth": 30, "width": 512, "batch": 512, "seeds": 5}
    full = {"depth": 60, "width": 1024, "batch": 1024, "seeds": 10}
    return [{"arm": arm, **(quick if budget == "quick" else full)} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return for each seed the squared gradient at the input of each layer, in units of that at the last one."""
    rows = []
    for seed in range(options["seeds"]):
        rows.append(squared_gradients(options["arm"], options["depth"], options["width"], options["batch"], seed))
        recorder.progress(seed + 1, options["seeds"])
    return {"squares": rows, "factors": [factor(row) for row in rows]}


def squared_gradients(arm: str, depth: int, width: int, batch: int, seed: int) -> list[float]:
    """Return ||dL/dh||^2 at the input of each layer, the first layer first, in units of the last.

    >>> len(squared_gradients("BN, no skips", depth=3, width=8, batch=16, seed=0))
    3

    A layer is relu(BN(W h)), relu(W h), or with skips h + W relu(BN(h)); L is linear in the output, in a random
    direction. Weights are Gaussian with variance 2 / width, inputs are Gaussian.
    """
    stream = torch.Generator().manual_seed(seed)
    h = torch.randn(batch, width, generator=stream).requires_grad_()
    inputs: list[Tensor] = []
    norm = BatchNorm1d(width)
    for _ in range(depth):
        weight = torch.randn(width, width, generator=stream) * math.sqrt(2 / width)
        inputs.append(h)
        if arm == SKIPS:
            h = h + torch.relu(norm(h)) @ weight.T
        else:
            z = h @ weight.T
            h = torch.relu(norm(z) if arm == PLAIN else z)
    slope = torch.randn(h.shape, generator=stream)
    found = torch.autograd.grad((h * slope).sum(), inputs)
    squares = [float(gradient.double().square().sum()) for gradient in found]
    return [square / squares[-1] for square in squares]


def factor(squares: Sequence[float]) -> float:
    """Return by what the squared gradient grows a layer, backward: the slope of a line through the logarithms.

    >>> round(factor([2.0**-layer for layer in range(20)]), 6)
    2.0
    """
    layers = np.arange(SETTLED, len(squares)) if len(squares) > SETTLED + 1 else np.arange(len(squares))
    return float(np.exp(-np.polyfit(layers, np.log(squares)[layers], 1)[0]))


def judge(parts: Sequence[Part]) -> Judgement:
    """The factor of the network without skips at pi / (pi - 1), that with skips below its root."""
    factors = {part.options["arm"]: [number(value) for value in part.result["factors"]] for part in parts}
    plain, skips = factors[PLAIN], factors[SKIPS]
    low, high = THEORY * (1 - AROUND), THEORY * (1 + AROUND)
    estimates = [
        median("growth of the squared gradient a layer", plain, low, unit="x"),
        median("growth of the squared gradient a layer", plain, high, above=False, unit="x"),
        median("growth a layer with skips", skips, FLAT, above=False, unit="x"),
    ]
    depth = len(parts[0].result["squares"][0])
    over = {part.options["arm"]: statistics.median(number(row[0]) for row in part.result["squares"]) for part in parts}
    return judged(
        f"With BN the squared gradient grows {estimates[0].value:.3f} times a layer in the backward pass (theory: "
        f"{THEORY:.3f}), {over[PLAIN]:,.0f} times over {depth} layers; with skips {estimates[2].value:.3f} times a "
        f"layer, {over[SKIPS]:,.0f} times over all.",
        estimates,
        len(plain),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The squared gradient at each layer, on a logarithmic axis, with the line of the theory."""
    lines = []
    for part in parts:
        arm, rows = part.options["arm"], part.result["squares"]
        lines.append(span_line(arm, range(1, len(rows[0]) + 1), rows, COLORS[arm], named_at=0.4))
    depth = len(lines[0].x)
    theory = [THEORY ** (depth - layer) for layer in range(1, depth + 1)]
    lines.append(Line("", range(1, depth + 1), theory, "ink", "dash", 1.4))
    panel = Panel("squared gradient, in units of the last layer's", tuple(lines), "layer", y_log=True)
    sentence = "Gradients go from the last layer to the first, here to the left; dashed: pi / (pi - 1) a layer."
    return [Panels("Gradients in the backward pass", sentence, (panel,), columns=1, height=340)]


CLAIM = Claim(
    name="explosion",
    question="costs",
    title="BN without skips makes gradients explode at initialisation",
    statement="In a plain ReLU network with BN the squared gradient grows 1.467 times a layer in the backward pass at "
    "initialisation, and skip connections take most of this growth away.",
    source=Source(
        "Yang et al. 2019, A mean field theory of Batch Normalization",
        "arXiv:1902.08129",
        "pi / (pi - 1) = 1.467 a layer for ReLU, wide layers and large batches",
    ),
    rule="Confirmed if the 95% interval of the factor is within 5% of 1.467 and with skips below its square root, "
    "1.211; refuted if one of these intervals is outside.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Random networks of fully connected layers, He weights, Gaussian inputs, a loss that is linear in the "
    "output; the factor is the slope of the logarithms over the layers from the 11th on.",
    limits="Initialisation only: training can leave it. The theory is for infinite width and batch; small batches "
    "make the factor larger. With skips the growth is not a constant factor: it is faster in the first layers, which "
    "the factor leaves out, and the picture shows.",
    retelling="“Batch Normalization solves exploding gradients”: at initialisation it is their cause in networks "
    "without skips; with He's initialisation and without BN there is no such growth.",
)
