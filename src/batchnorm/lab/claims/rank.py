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
from batchnorm.lab.judge.spans import span_line
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Panel, Panels, Section, thinned

PLAIN, WITH, SCALE = "without BN", "with BN", "BN without the mean"
COLORS = {PLAIN: "vermillion", WITH: "blue", SCALE: "green"}
KINDS = ("linear, wide", "linear, narrow", "ReLU, wide")
WIDE, NARROW = (8, 512), (32, 128)  # examples and units: the theory asks for more units than examples squared
ONE = 2.0  # below this stable rank one direction has more than half of the energy
ORTHOGONAL = 0.5  # of the first layer's gap
POINTS = 60


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each kind of layers and network."""
    amounts = {"depth": 2000, "seeds": 10} if budget == "quick" else {"depth": 20_000, "seeds": 20}
    return [{"layers": kind, "arm": arm, **amounts} for kind in KINDS for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return stable rank and orthogonality gap of each seed's signals at some layers."""
    images = examples(sets.load("digits"), flat=True).train_inputs
    images = images - images.mean(0)  # pixels are positive: as they are, digits already point in about one direction
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
        z = random_layer(h, width, stream)
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


def random_layer(h: Tensor, width: int, stream: torch.Generator) -> Tensor:
    """Return h W for a Gaussian W that keeps lengths, drawn only in the span of the examples: for any W the same law.

    >>> random_layer(torch.eye(3), 5, torch.Generator()).shape
    torch.Size([3, 5])
    """
    r = torch.linalg.qr(h.T, mode="r").R  # h = r.T q.T, and q.T W is as Gaussian as W
    found: Tensor = r.T @ torch.randn(len(r), width, generator=stream) / math.sqrt(h.shape[1])
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
        ratio("orthogonality gap with BN, last layer / input", gaps[0], gaps[1], ORTHOGONAL, above=False, paired=True),
    ]
    depth, first = found[WITH]["layers"][-1], median("", [number(row[0]) for row in found[PLAIN]["rank"]], ONE)
    return judged(
        f"{count} digits of stable rank {first.value:.1f} have stable rank {estimates[1].value:.1f} after {depth:,} "
        f"random linear layers with BN and {estimates[0].value:.2f} without; the orthogonality gap with BN (without "
        f"its mean) is {estimates[2].value:.2f} times that of the input.",
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
                    lines.append(span_line(arm, part.result["layers"], part.result[key], COLORS[arm]))
            panels.append(Panel(f"{title}, {kind}", tuple(lines), "layer", y_log=key == "rank"))
    sentence = (
        "Digits in random networks, before any training. Stable rank 1: all examples lie on one line. Gap 0: every two "
        "are orthogonal. Medians of the seeds and their span."
    )
    return [Panels("Signals of random networks", sentence, tuple(panels), columns=3)]


CLAIM = Claim(
    name="rank",
    question="why",
    title="BN keeps random deep networks from rank collapse",
    statement="In random deep linear networks the signals of different examples collapse to one direction without BN; "
    "with BN their stable rank stays above the square root of their number and they grow more orthogonal.",
    source=Source(
        "Daneshmand et al. 2020 and 2021",
        "arXiv:2003.01652, arXiv:2106.03970",
        "Theorems: with BN the rank stays of the order of the root of the width, and the gap decays with depth.",
    ),
    rule="Confirmed if the 95% intervals, at the last of the wide linear layers, say: the stable rank without BN is "
    "below 2 (one direction has more than half of the energy), with BN above the root of the batch size, and the gap "
    "(with BN that divides and subtracts no mean, as in the theory) is below half of that of the input. Refuted if one "
    "says the contrary.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Wide: 8 digits of each seed, 512 units; narrow: 32 and 128; the mean image is subtracted. Random Gaussian "
    "layers (quick: 2,000; full: 20,000), in training mode, nothing is trained. Stable rank is ||H||_F^2 / ||H||_2^2, "
    "the gap || G / ||G|| - I / ||I|| || with G the Gram matrix of the examples. Of each weight matrix only the part "
    "is drawn that acts on the examples, which changes no distribution.",
    limits="Initialisation only, and wide linear layers as in the theory, whose gap has a floor of about the batch "
    "size over the root of the width: narrow networks are drawn and not judged; there the signals do not become "
    "orthogonal. Nor are those with ReLU: their signals are positive, which bounds the stable rank, but without BN "
    "they collapse the soonest. The 2020 theorem is about batches larger than the width; with fewer examples than "
    "units the rank cannot exceed their number, so the bound that is tested is the root of that.",
    version=3,  # 2: wide networks, and BN without the mean for the gap; 3: the input's stable rank was below 2 itself
)
