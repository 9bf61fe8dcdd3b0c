"""In training mode Batch Normalization is not a linear function of its input; in evaluation mode it is affine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import exact, median, number
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

TOLERANCE = 1e-10
CLEAR = 0.1  # of the largest value: far more than rounding
SCALES = tuple(float(f"{10 ** (exponent / 4):.3g}") for exponent in range(-8, 9))  # 0.01 to 100
MODES = ("training", "evaluation")
DEFECTS = {"scaling": "f(ax) - f(0) = a (f(x) - f(0))", "sums": "f(x + y) - f(0) = f(x) - f(0) + f(y) - f(0)"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: arithmetic in float64 on random layers and batches."""
    return [{"layers": 50 if budget == "quick" else 2000}]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return both defects of every layer in both modes, and how large the output is for an input of each size."""
    found: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in DEFECTS} for mode in MODES}
    sizes: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(options["layers"]):
        x, y, a = inputs(seed)
        for mode in MODES:
            layer = layer_of(seed).train(mode == "training")
            scaling, sums = defects(layer, x, y, a)
            found[mode]["scaling"].append(scaling)
            found[mode]["sums"].append(sums)
            if seed == 0:
                sizes[mode] = [spread(layer, scale * x) for scale in SCALES]
        recorder.progress(seed + 1, options["layers"])
    return {"defects": found, "sizes": sizes}


def inputs(seed: int) -> tuple[Tensor, Tensor, float]:
    """Return two batches of 16 examples of 4 channels, and a positive factor other than 1."""
    stream = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(16, 4, generator=stream, dtype=torch.float64) * 3 + 1 for _ in range(2))
    return x, y, float(2 + 8 * torch.rand((), generator=stream))


def layer_of(seed: int) -> BatchNorm1d:
    """Return our layer in float64 with random parameters and statistics."""
    stream = torch.Generator().manual_seed(10_000 + seed)
    layer = BatchNorm1d(4, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            assert tensor is not None
            tensor.copy_(0.5 + torch.rand(4, generator=stream, dtype=torch.float64))
    return layer


@torch.no_grad()
def defects(layer: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, a: float) -> tuple[float, float]:
    """Return by how much scaling and sums fail, as shares of the largest value that was expected.

    >>> defects(lambda x: 2 * x + 1, torch.ones(3), torch.zeros(3), 5.0)
    (0.0, 0.0)
    """
    zero = layer(torch.zeros_like(x))
    at_x, at_y = layer(x) - zero, layer(y) - zero
    return apart(layer(a * x) - zero, a * at_x), apart(layer(x + y) - zero, at_x + at_y)


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def spread(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the standard deviation of the first output over the batch."""
    return float(layer(x)[:, 0].std())


def judge(parts: Sequence[Part]) -> Judgement:
    """Both defects are clear in training and absent in evaluation."""
    found = parts[0].result["defects"]
    values = {mode: {name: [number(v) for v in found[mode][name]] for name in DEFECTS} for mode in MODES}
    estimates = [
        *(median(f"defect of {name} in training", values["training"][name], CLEAR) for name in DEFECTS),
        *(
            exact(f"largest defect of {name} in evaluation", max(values["evaluation"][name]), TOLERANCE, above=False)
            for name in DEFECTS
        ),
    ]
    return judged(
        f"In training sums fail by {100 * estimates[1].value:.0f}% of the largest value and scaling by "
        f"{100 * estimates[0].value:.0f}%; in evaluation the largest defect is "
        f"{max(estimate.value for estimate in estimates[2:]):.1g}.",
        estimates,
        len(values["training"]["sums"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The size of the output over the size of the input in both modes, and a table of the defects."""
    result = parts[0].result
    looks = {"training": "blue", "evaluation": "green"}
    lines = [Line(mode, SCALES, result["sizes"][mode], looks[mode]) for mode in MODES]
    middle = result["sizes"]["evaluation"][len(SCALES) // 2]
    lines.append(Line("linear", SCALES, [scale * middle for scale in SCALES], "ink", "dot", 1.0, nudge=14))
    panel = Panel("spread of the output", tuple(lines), "factor on the input", x_log=True, y_log=True)
    rows = [
        (DEFECTS[name], mode, f"{max(map(number, result['defects'][mode][name])):.1e}")
        for name in DEFECTS
        for mode in MODES
    ]
    sentence = "Ten times the input: ten times the spread in evaluation, the same output in training."
    return [
        Panels("Not linear in training", sentence, (panel,), columns=2, height=320),
        Table(
            "By how much linearity fails", "Largest defect.", ("would hold if linear", "mode", "defect"), tuple(rows)
        ),
    ]


CLAIM = Claim(
    name="nonlinear",
    question="why",
    title="BN is not linear in training; it is affine in evaluation",
    statement="In training mode Batch Normalization is neither homogeneous nor additive, not even up to a constant; in "
    "evaluation mode it is an affine function.",
    source=Source(
        "Ioffe & Szegedy 2015, sections 3.1 and 3.3",
        "arXiv:1502.03167",
        "BN(Wu) = BN((aW)u) in training; at inference normalisation is a linear transform of each activation.",
    ),
    rule="Defects as shares of the largest value. Confirmed if in training the 95% interval of the median defect of "
    "scaling and of sums is above 10%, and in evaluation the largest of each is below 1e-10; refuted if one lies on "
    "the other side.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Random batches of 16 examples of 4 channels, random parameters and running statistics, float64. The value "
    "at 0 is subtracted, so that an affine function has no defect.",
    limits="It is about the layer alone. A function of the batch that is not linear may still be nearly so for one "
    "example in a large batch.",
    retelling="“BN is just a linear rescaling, so it can be ignored in the analysis of a network”: that is so in "
    "evaluation mode; in training a factor on the input changes nothing at all.",
)
