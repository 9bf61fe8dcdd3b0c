"""Batch Normalization keeps the signals of random deep networks from collapsing to one direction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median, number, ratio
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section, thinned

PLAIN, WITH, SCALE = "without BN", "with BN", "BN without the mean"
COLORS = {PLAIN: "vermillion", WITH: "blue", SCALE: "green"}
KINDS = ("linear, wide", "linear, narrow", "ReLU, wide")
WIDE, NARROW = (8, 512), (32, 128)  # examples and units: the theory asks for more units than examples squared
ONE = 2.0  # a stable rank below it is a collapse to one direction
ORTHOGONAL = 0.5  # of the first layer's gap
POINTS = 60


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each kind of layers and network."""
    amounts = {"depth": 200, "seeds": 10} if budget == "quick" else {"depth": 2000, "seeds": 20}
    return [{"layers": kind, "arm": arm, **amounts} for kind in KINDS for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return stable rank and orthogonality gap of each seed's signals at some layers."""
    images = examples(sets.load("digits"), flat=True).train_inputs
    layers = [0, *thinned(range(1, options["depth"] + 1), POINTS)]
    ranks, gaps = [], []
    for seed in range(options["seeds"]):
        own = signals(images, options, seed, set(layers))
        ranks.append([stable_rank(h) for h in own])
        gaps.append([gap(h) for h in own])
        recorder.progress(seed + 1, options["seeds"])
    return {"layers": layers, "rank": ranks, "gap": gaps}


@torch.no_grad()
def signals(images: Tensor, options: Mapping[str, Any], seed: int, layers: set[int]) -> list[Tensor]:
    """Return the signals (examples, units) behind the given layers of one random network; 0 is its input.

    Behind each layer without BN all signals are divided by one number, so that nothing overflows; neither figure sees
    it.
    """
    stream = torch.Generator().manual_seed(seed)
    count, width = NARROW if "narrow" in options["layers"] else WIDE
    h = images[torch.randperm(len(images), generator=stream)[:count]]
    norm, found = BatchNorm1d(width), [h] if 0 in layers else []
    for layer in range(1, options["depth"] + 1):
        z = h @ torch.randn(h.shape[1], width, generator=stream) / math.sqrt(h.shape[1])
        if options["arm"] == WITH:
            z = norm(z)
        elif options["arm"] == SCALE:
            z = z / (z.square().mean(0) + norm.eps).sqrt()
        h = torch.relu(z) if "ReLU" in options["layers"] else z
        if options["arm"] == PLAIN:
            h = h / h.square().mean().sqrt()
        if layer in layers:
            found.append(h)
    return found


def stable_rank(h: Tensor) -> float:
    """Return the sum of the squared singular values in units of the largest.

    >>> stable_rank(torch.eye(3)), stable_rank(torch.ones(3, 3))
    (3.0, 1.0)
    """
    squares = torch.linalg.svdvals(h.double()).square()
    return round(float(squares.sum() / squares[0]), 6)


def gap(h: Tensor) -> float:
    """Return how far examples are from being orthogonal and of one length: || G / ||G|| - I / ||I|| ||, G = h h^T.

    >>> gap(torch.eye(3)), round(gap(torch.ones(4, 4)), 6)
    (0.0, 1.0)
    """
    gram, identity = h.double() @ h.double().T, torch.eye(len(h), dtype=torch.float64)
    return round(float((gram / gram.norm() - identity / identity.norm()).norm()), 6)


def judge(parts: Sequence[Part]) -> Judgement:
    """The wide linear networks, of which the theory speaks, at their last layer."""
    found = {part.options["arm"]: part.result for part in parts if part.options["layers"] == KINDS[0]}
    last = {arm: [number(row[-1]) for row in result["rank"]] for arm, result in found.items()}
    gaps = [[number(row[place]) for row in found[SCALE]["gap"]] for place in (-1, 0)]
    count = WIDE[0]
    estimates = [
        median("stable rank without BN, last layer", last[PLAIN], ONE, above=False),
        median("stable rank with BN, last layer", last[WITH], math.sqrt(count)),
        ratio("orthogonality gap, last layer / input", gaps[0], gaps[1], ORTHOGONAL, above=False, paired=True),
    ]
    depth = found[WITH]["layers"][-1]
    return judged(
        f"After {depth} random linear layers the signals of {count} examples have stable rank "
        f"{estimates[1].value:.1f} with BN and {estimates[0].value:.2f} without; the orthogonality gap with BN "
        f"(without its mean) is {estimates[2].value:.2f} times that of the input.",
        estimates,
        len(last[WITH]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Stable rank and gap over the layers, for each kind of layers."""
    panels = []
    for key, title in (("rank", "stable rank"), ("gap", "orthogonality gap")):
        for kind in KINDS:
            lines = []
            for part in parts:
                if part.options["layers"] == kind:
                    arm = part.options["arm"]
                    columns = [sorted(map(number, column)) for column in zip(*part.result[key], strict=True)]
                    middle = [column[(len(column) - 1) // 2] for column in columns]
                    spread = {"low": [column[0] for column in columns], "high": [column[-1] for column in columns]}
                    lines.append(Line(arm, part.result["layers"], middle, COLORS[arm], **spread))
            panels.append(Panel(f"{title}, {kind}", tuple(lines), "layer", y_log=key == "rank"))
    sentence = "Digits in random networks, before any training: without BN they end up on one line."
    return [Panels("Signals of random networks", sentence, tuple(panels), columns=3)]


CLAIM = Claim(
    name="rank",
    question="why",
    title="BN keeps random deep networks from rank collapse",
    statement="In random deep linear networks the signals of different examples collapse to one direction without BN; "
    "with BN their stable rank stays above the square root of their number and they grow more orthogonal.",
    source=Source("Daneshmand et al. 2020 and 2021", "arXiv:2003.01652, arXiv:2106.03970"),
    rule="Confirmed if the 95% intervals, at the last of the wide linear layers, say: the stable rank without BN is "
    "below 2, with BN above the root of the batch size, and the gap (with BN that divides and subtracts no mean, as in "
    "the theory) is below half of that of the input. Refuted if one says the contrary.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Wide: 8 digits of each seed, 512 units; narrow: 32 and 128. Random Gaussian layers, in training mode, nothing is trained; stable rank "
    "is ||H||_F^2 / ||H||_2^2, the gap || G / ||G|| - I / ||I|| || with G the Gram matrix of the examples.",
    limits="Initialisation only, and wide linear layers as in the theory, whose gap has a floor of about the batch "
    "size over the root of the width: narrow networks are drawn and not judged; there the signals do not become "
    "orthogonal. Nor are those with ReLU: their signals are positive, which bounds the stable rank.",
    version=2,  # the first had narrow networks, about which the theory says nothing, and BN with the mean for the gap
)
