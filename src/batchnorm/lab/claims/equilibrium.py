"""Weight decay in front of Batch Normalization sets the angle by which the weights turn at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import angles, decayed, invariant, noisy_batches
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.judge.spans import span_line
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

RATES, DECAYS, MOMENTA = (0.1, 0.4), (0.03, 0.1), (0.0, 0.5, 0.9)
GRID = tuple((rate, decay, momentum) for momentum in MOMENTA for rate in RATES for decay in DECAYS)
COLORS = {0.0: "blue", 0.5: "green", 0.9: "purple"}
LOW, HIGH = 0.8, 1.25  # measured in units of predicted: about 1
MEASURED = 0.3  # of the steps, the last ones
EVERY = 5  # of them


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each momentum."""
    amounts = {"steps": 1600, "seeds": 5} if budget == "quick" else {"steps": 20_000, "seeds": 10}
    return [{"momentum": momentum, **amounts} for momentum in MOMENTA]


def predicted(rate: float, decay: float, momentum: float) -> float:
    """Return the angle of a step in equilibrium: sqrt(2 lr wd / (1 + momentum)).

    >>> round(predicted(0.1, 0.05, 0.0), 6)
    0.1
    """
    return math.sqrt(2 * rate * decay / (1 + momentum))


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train every seed at every rate and decay; return the root of the mean squared angle of the last steps."""
    steps, momentum = options["steps"], options["momentum"]
    cells = [(rate, decay) for rate in RATES for decay in DECAYS]
    members = [(*cell, seed) for cell in cells for seed in range(options["seeds"])]
    rates, decays = (torch.tensor([member[place] for member in members]) for place in (0, 1))
    own = [member[2] for member in members]
    stack = Copies([invariant(seed) for seed in own])
    data = examples(sets.load("digits"), flat=True)
    squares: list[Tensor] = []
    courses: list[Tensor] = []
    held: list[Tensor] = []

    def watch(step: int) -> None:
        recorder.progress(step, steps)
        if step % EVERY == 0 and held:
            turned = angles(held, stack.parameters).square().mean(0)
            courses.append(turned)
            if step > (1 - MEASURED) * steps:
                squares.append(turned)
        held[:] = [tensor.clone() for tensor in stack.parameters] if (step + 1) % EVERY == 0 else []

    stream = noisy_batches(data, own, 32)
    decayed(
        stack, stream, steps, lambda step: rates, decays=decays, momenta=torch.full_like(rates, momentum), watch=watch
    )  # fmt: skip
    found = torch.stack(squares).mean(0).sqrt().view(len(cells), -1)
    course = torch.stack(courses).view(len(courses), len(cells), -1).median(2).values.sqrt()
    thin = course[:: max(len(course) // 40, 1)]
    return {
        "angles": found.tolist(),
        "courses": [[float(f"{value:.4g}") for value in column] for column in thin.T.tolist()],
        "at": [EVERY * (1 + place) for place in range(len(course))][:: max(len(course) // 40, 1)],
    }


def ratios(parts: Sequence[Part]) -> dict[tuple[float, float, float], list[float]]:
    """Return measured / predicted for each cell of the grid, a number for each seed."""
    found = {}
    for part in parts:
        momentum = part.options["momentum"]
        cells = [(rate, decay, momentum) for rate in RATES for decay in DECAYS]
        for cell, row in zip(cells, part.result["angles"], strict=True):
            found[cell] = [number(value) / predicted(*cell) for value in row]
    return found


def judge(parts: Sequence[Part]) -> Judgement:
    """For every seed the smallest and the largest ratio of the grid are near 1."""
    found = ratios(parts)
    seeds = list(zip(*found.values(), strict=True))
    estimates = [
        median("smallest measured / predicted of the grid", [min(row) for row in seeds], LOW),
        median("largest measured / predicted of the grid", [max(row) for row in seeds], HIGH, above=False),
    ]
    return judged(
        f"Over {len(found)} settings the angle of a step is {estimates[0].value:.2f} to {estimates[1].value:.2f} times "
        "sqrt(2 lr wd / (1 + momentum)).",
        estimates,
        len(seeds),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Measured against predicted angles; the angles over time; a table."""
    found = ratios(parts)
    panels = [Panel("measured angle", against(found), "predicted angle", x_log=True, y_log=True)]
    for part in parts:
        momentum, lines = part.options["momentum"], []
        cells = [(rate, decay) for rate in RATES for decay in DECAYS]
        for (rate, decay), course in zip(cells, part.result["courses"], strict=True):
            goal, at = predicted(rate, decay, momentum), part.result["at"]
            lines.append(
                Line(f"rate {rate:g}, decay {decay:g}", at, [number(v) for v in course], COLORS[momentum], width=1.4)
            )
            lines.append(Line("", at, [goal] * len(at), "ink", "dash", 1.2))
        panels.append(Panel(f"angle of a step, momentum {momentum:g}", tuple(lines), "step", y_log=True))
    rows = []
    for cell, values in found.items():
        middle = sorted(values)[(len(values) - 1) // 2]
        goal = predicted(*cell)
        rows.append((*(f"{value:g}" for value in cell), f"{goal:.4f}", f"{middle * goal:.4f}", f"{middle:.3f}"))
    sentence = "Predicted, dashed: sqrt(2 lr wd / (1 + momentum)), which knows no data. Angles in radians, medians."
    columns = ("rate", "decay", "momentum", "predicted", "measured", "ratio")
    return [
        Panels("Predicted and measured angles", sentence, tuple(panels), columns=2, height=300),
        Table("All settings", "Angles in radians, medians of the seeds.", columns, tuple(rows), tuple(range(6))),
    ]


def against(found: Mapping[tuple[float, float, float], Sequence[float]]) -> tuple[Line, ...]:
    """Return a line for each momentum, measured over predicted angles, and where both are the same."""
    lines = []
    for place, (momentum, color) in enumerate(COLORS.items()):
        cells = sorted((cell for cell in found if cell[2] == momentum), key=lambda cell: predicted(*cell))
        goals = [predicted(*cell) for cell in cells]
        columns = [[goal * value for value in found[cell]] for goal, cell in zip(goals, cells, strict=True)]
        rows = list(zip(*columns, strict=True))
        named = {"named_at": place / len(COLORS), "nudge": 22.0 * (place % 2)}
        lines.append(span_line(f"momentum {momentum:g}", goals, rows, color, **named))
    ends = [pick(predicted(*cell) for cell in found) for pick in (min, max)]
    return (*lines, Line("", ends, ends, "ink", "dash", 1.4))


CLAIM = Claim(
    name="equilibrium",
    question="why",
    title="Weight decay in front of BN sets the angle of each step",
    statement="Trained by SGD with weight decay, weights in front of BN come to turn by sqrt(2 lr wd / (1 + momentum)) "
    "a step, whatever the data and the gradient.",
    source=Source(
        "Wan et al. 2021, Spherical motion dynamics; van Laarhoven 2017",
        "arXiv:2006.08419, arXiv:1706.05350",
        "A theorem; on ImageNet and MSCOCO the measured angles agree with it.",
    ),
    rule="Of each seed, the smallest and the largest ratio of measured to predicted over the grid. Confirmed if the "
    "95% interval of the median of the smallest is above 0.8 and of the largest below 1.25; refuted if one is outside.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Two layers of 32 ReLUs with BN without gamma and beta, a fixed read-out; digits, batches of 32, 12 "
    "settings: rates 0.1 and 0.4, decays 0.03 and 0.1, momenta 0, 0.5 and 0.9. The angle is the root of the mean "
    "square, over layers and every fifth step of the last 30% of training.",
    limits="The decays are larger than usual, so that the equilibrium is reached in few steps: it takes several times "
    "1 / (lr wd) of them, and before that the angle is another one. With the decays in use that is a large part of "
    "training. Where the gradients of a layer's steps are correlated, the prediction is rougher.",
    version=2,  # in the first, one setting was not in equilibrium when it was measured: 1.2 / (lr wd) steps
)
