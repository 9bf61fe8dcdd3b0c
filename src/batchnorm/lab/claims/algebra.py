"""The identities of Batch Normalization hold exactly; what is not an identity is shown beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import exact, number
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Section, Table

TOLERANCE = 1e-10
EPS = 1e-30  # 0 beside any variance here
IDENTITIES = {
    "scale": "BN((aW)u) = BN(Wu)",
    "input": "d BN((aW)u) / du = d BN(Wu) / du",
    "weight": "d BN((aW)u) / d(aW) = (1/a) d BN(Wu) / dW",
    "recover": "gamma = sd, beta = mean: the identity, with population statistics",
    "bias": "the gradient of a bias in front is 0",
    "pair": "two examples: every output is +1 or -1",
    "bound": "no output is above sqrt(m - 1)",
}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: arithmetic in float64 on random networks."""
    return [{"networks": 20 if budget == "quick" else 500}]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return the largest error of each identity, relative to the largest value; and the gap of a per-batch identity."""
    errors = dict.fromkeys(IDENTITIES, 0.0)
    gap = float("inf")
    for seed in range(options["networks"]):
        found, one_gap = identities(seed)
        errors = {name: max(errors[name], found[name]) for name in errors}
        gap = min(gap, one_gap)
        recorder.progress(seed + 1, options["networks"])
    return {"errors": errors, "gap": gap}


def identities(seed: int) -> tuple[dict[str, float], float]:
    """Return the error of each identity for one random layer, and how far a mini-batch is from being the identity."""
    stream = torch.Generator().manual_seed(seed)
    m, inputs, outputs = 16, 5, 4
    u = torch.randn(m, inputs, generator=stream, dtype=torch.float64).requires_grad_()
    weight = torch.randn(outputs, inputs, generator=stream, dtype=torch.float64).requires_grad_()
    bias = torch.randn(outputs, generator=stream, dtype=torch.float64).requires_grad_()
    slope = torch.randn(m, outputs, generator=stream, dtype=torch.float64)
    a = 10 ** (4 * torch.rand((), generator=stream, dtype=torch.float64) - 2)
    layer = BatchNorm1d(outputs, eps=EPS, dtype=torch.float64)
    scaled = (a * weight.detach()).requires_grad_()
    y, z = layer(u @ weight.T + bias), layer(u @ scaled.T + bias)
    du, dw, db = torch.autograd.grad((y * slope).sum(), (u, weight, bias))
    du_scaled, dw_scaled = torch.autograd.grad((z * slope).sum(), (u, scaled))
    x = torch.randn(m, outputs, generator=stream, dtype=torch.float64) * 3 + 1
    population = BatchNorm1d(outputs, eps=EPS, dtype=torch.float64).eval()
    mean, var = (torch.randn(outputs, generator=stream, dtype=torch.float64) for _ in range(2))
    var = 0.5 + var.square()
    population.load_state_dict(
        {"running_mean": mean, "running_var": var, "weight": var.sqrt(), "bias": mean}, strict=False
    )
    with torch.no_grad():
        recovered = population(x)
        population.train()
        mini_batch = population(x)
        pair = BatchNorm1d(outputs, eps=EPS, dtype=torch.float64)(x[:2])
        spike = torch.zeros(m, outputs, dtype=torch.float64)
        spike[0] = 1e6
        largest = BatchNorm1d(outputs, eps=EPS, dtype=torch.float64)(spike).abs().max()
    return {
        "scale": distance(z, y),
        "input": distance(du_scaled, du),
        "weight": distance(a * dw_scaled, dw),
        "recover": distance(recovered, x),
        "bias": float(db.abs().max() / dw.abs().max()),
        "pair": distance(pair.abs(), torch.ones_like(pair)),
        "bound": max(0.0, float(largest / (m - 1) ** 0.5) - 1),
    }, distance(mini_batch, x)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as a share of the largest value."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def judge(parts: Sequence[Part]) -> Judgement:
    """Every identity within the tolerance."""
    errors = {name: number(error) for name, error in parts[0].result["errors"].items()}
    worst = max(errors, key=lambda name: errors[name])
    return judged(
        f"{len(errors)} identities hold in float64; the largest error, {errors[worst]:.1g}, is that of: "
        f"{IDENTITIES[worst]}.",
        [exact(IDENTITIES[name], error, TOLERANCE, above=False) for name, error in errors.items()],
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """A table of the identities, with one that is none."""
    result = parts[0].result
    rows = [(IDENTITIES[name], f"{number(error):.1e}") for name, error in result["errors"].items()]
    rows.append(("gamma = sd, beta = mean on a mini-batch: no identity", f"at least {number(result['gap']):.1e}"))
    sentence = "The largest error over random layers, relative to the largest value, in float64 with eps near 0."
    return [Table("Identities", sentence, ("identity", "largest error"), tuple(rows), (1,), muted=(len(rows) - 1,))]


CLAIM = Claim(
    name="algebra",
    question="works",
    title="The identities of Batch Normalization hold to rounding",
    statement="The identities that the paper states for Batch Normalization, and two that follow from its definition, "
    "hold in float64 up to 1e-10.",
    source=Source(
        "Ioffe & Szegedy 2015, sections 3, 3.2 and 3.3",
        "arXiv:1502.03167",
        "A scale of the weights changes neither the output nor the gradient of the input, and divides that of the "
        "weights; a bias in front has no effect; gamma and beta can recover the input.",
    ),
    rule="Confirmed if the largest error of every identity is below 1e-10; refuted if one is above.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Random layers, 5 inputs, 4 outputs, on batches of 16; weights scaled by 0.01 to 100; float64, eps = 1e-30. "
    "The outputs for two examples and the bound on the outputs are not in the paper.",
    limits="With eps above 0 scale invariance is approximate, the more the smaller the variance. Arithmetic on layers, "
    "not a statement about training.",
    retelling="“Batch Normalization can represent the identity, so the network is exactly as expressive”: with "
    "population statistics it can; on a mini-batch gamma and beta cannot undo a mean that changes from batch to batch.",
)
