"""With weight decay, a normalised network goes to the edge of stability, and there finds flatter places."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import as_vectors, decayed, invariant
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import along, copy_losses
from batchnorm.report.sections import Line, Panel, Panels, Section

Gradients = Callable[[], list[Tensor]]
EDGE = (1.6, 2.5)  # lr x sharpness: about 2
STEP = 1e-4  # of a finite difference, in units of the weights' norm
ITERATIONS = 12  # of the power method, which begins where it ended before
REACHED = 1.9  # lr x sharpness from which on the edge counts as reached


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: all seeds at once."""
    quick = {"steps": 2000, "seeds": 5, "examples": 128, "rate": 0.5, "decay": 0.002, "records": 40}
    full = {"steps": 20_000, "seeds": 10, "examples": 512, "rate": 0.5, "decay": 0.0005, "records": 100}
    return [quick if budget == "quick" else full]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train by gradient descent on the whole batch; return sharpness, spherical sharpness and loss on the way."""
    steps, seeds = options["steps"], options["seeds"]
    data = examples(sets.load("digits"), flat=True).to(torch.float64)
    chosen = [
        torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))[: options["examples"]]
        for seed in range(seeds)
    ]
    x, labels = (torch.stack([part[index] for index in chosen]) for part in (data.train_inputs, data.train_labels))
    stack = Copies([invariant(seed, activation="sigmoid").double() for seed in range(seeds)])
    every = max(steps // options["records"], 1)
    direction = [torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) for p in
                 stack.parameters]  # fmt: skip
    found: dict[str, list[list[float]]] = {"sharpness": [], "spherical": [], "loss": []}

    def watch(step: int) -> None:
        recorder.progress(step, steps)
        if step % every == 0:
            values, direction[:] = sharpness(
                lambda: stack.gradients(copy_losses(stack.scores(x), labels)), stack.parameters, direction
            )
            squares = as_vectors(stack.parameters).square().sum(1)
            found["sharpness"].append((options["rate"] * values).tolist())
            found["spherical"].append((squares * values).tolist())
            found["loss"].append(copy_losses(stack.scores(x), labels).detach().tolist())

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield x, labels

    rates, decays = (torch.full((seeds,), options[name], dtype=torch.float64) for name in ("rate", "decay"))
    decayed(stack, stream(), steps, lambda step: rates, decays=decays, watch=watch)
    rows = {name: [[float(f"{v:.5g}") for v in column] for column in zip(*values, strict=True)] for name, values in
            found.items()}  # fmt: skip
    return {"at": [every * (place + 1) for place in range(len(found["loss"]))], **rows}


def sharpness(
    gradients: Gradients, parameters: Sequence[Tensor], direction: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return each copy's largest eigenvalue of the Hessian, by the power method, and its eigenvector.

    >>> w = torch.ones(1, 2, dtype=torch.float64)
    >>> bowl = lambda: [w * torch.tensor([3.0, 0.5])]  # the gradient of (3 a^2 + b^2 / 2) / 2
    >>> values, _ = sharpness(bowl, [w], [torch.ones(1, 2, dtype=torch.float64)])
    >>> round(values.item(), 4)
    3.0

    Products with the Hessian are central differences of gradients. The parameters are as they were afterwards.
    """
    before = [p.clone() for p in parameters]
    lengths = as_vectors(before).norm(dim=1)
    way = list(direction)
    values = torch.zeros_like(lengths)
    for _ in range(ITERATIONS):
        norms = as_vectors(way).norm(dim=1)
        way = [v / along(norms, v) for v in way]
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, start, v in zip(parameters, before, way, strict=True):
                    p.copy_(start + v * along(sign * STEP * lengths, v))
            sides.append(gradients())
        product = [(a - b).detach() / along(2 * STEP * lengths, a) for a, b in zip(*sides, strict=True)]
        values = (as_vectors(way) * as_vectors(product)).sum(1)
        way = product
    with torch.no_grad():
        for p, start in zip(parameters, before, strict=True):
            p.copy_(start)
    return values, way


def edge(values: Sequence[float]) -> float:
    """Return the median of lr x sharpness over the second half of training."""
    half = sorted(values[len(values) // 2 :])
    return half[len(half) // 2]


def flattened(values: Sequence[float], spherical: Sequence[float]) -> float:
    """Return the spherical sharpness at the end in units of that where the edge was reached; NaN if it never was.

    >>> flattened([1.0, 2.0, 2.0, 2.0], [9.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0])
    0.5

    Both are medians of three records, so that a single overshoot does not count.
    """
    place = next((index for index, value in enumerate(values) if value >= REACHED), None)
    if place is None:
        return float("nan")
    return statistics.median(spherical[-3:]) / statistics.median(spherical[place : place + 3])


def judge(parts: Sequence[Part]) -> Judgement:
    """The edge within its bounds, and the spherical sharpness lower at the end than where it was reached."""
    result = parts[0].result
    rows = [[[number(v) for v in row] for row in result[name]] for name in ("sharpness", "spherical")]
    edges = [edge(row) for row in rows[0]]
    falls = [flattened(*pair) for pair in zip(*rows, strict=True)]
    name = "lr x sharpness, second half of training"
    estimates = [
        median(name, edges, EDGE[0]),
        median(name, edges, EDGE[1], above=False),
        median("spherical sharpness, end / where the edge was reached", falls, 1.0, above=False, unit="x"),
    ]
    return judged(
        f"The sharpness settles at {estimates[0].value:.2f} / lr (the edge of stability is at 2); from there to the "
        f"end the spherical sharpness changes {estimates[2].value:.2f} times.",
        estimates,
        len(edges),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Sharpness, spherical sharpness and loss, a line for each seed."""
    result, panels = parts[0].result, []
    titles = {"sharpness": "lr x sharpness", "spherical": "spherical sharpness", "loss": "loss"}
    for name, title in titles.items():
        lines = [Line("", result["at"], [number(v) for v in row], "blue", width=1.2) for row in result[name]]
        if name == "sharpness":
            lines.append(Line("2", result["at"], [2.0] * len(result["at"]), "ink", "dash", 1.4))
        panels.append(Panel(title, tuple(lines), "step", y_log=True))
    sentence = (
        "Gradient descent on the whole batch; dashed: above 2 / lr a step along the sharpest direction overshoots."
    )
    return [Panels("To the edge, and along it", sentence, tuple(panels), columns=3, height=300)]


CLAIM = Claim(
    name="sharpness",
    question="why",
    title="With weight decay, normalised networks go to the edge and flatten",
    statement="Under gradient descent with weight decay the sharpness of a normalised network rises to about 2 / lr "
    "and stays there, while its spherical sharpness, at weights of norm 1, falls.",
    source=Source(
        "Lyu, Li & Arora 2022",
        "arXiv:2206.07085",
        "a theorem for a small rate times decay, and plots: 2 / lr is reached, then spherical sharpness falls",
    ),
    rule="Confirmed if the 95% interval of lr x sharpness (a seed's median over the second half of training) is within "
    "1.6 to 2.5, and that of the spherical sharpness at the end, in units of the one where lr x sharpness first "
    "reached 1.9 (medians of three records), is below 1; refuted if one is outside. A seed that never reached it "
    "makes it inconclusive.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Two layers of 32 sigmoids with BN without gamma and beta, a fixed read-out; 128 digits of each seed as one "
    "batch, float64, rate 0.5, decay 0.002, 2000 steps. Sharpness is the largest eigenvalue of the Hessian by the "
    "power method; spherical sharpness is sharpness x ||w||^2.",
    limits="A small network and few examples. Sigmoids, because the theory asks for a smooth loss. The rate is such "
    "that the edge is near at the start. The fall is that of the first steps at the edge: the theory's is slow, and "
    "goes on. The theory is for a small rate times decay; with a short budget this is not very small, several "
    "directions are at the edge at once, and the sharpness stays above 2 / lr, between two steps as at them.",
)
