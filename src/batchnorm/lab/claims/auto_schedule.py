"""Without weight decay the weights in front of Batch Normalization grow like t^(1/4): a rate that decays by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import as_vectors, decayed, invariant, noisy_batches
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Line, Panel, Panels, Section

RATES = (0.3, 0.6, 1.0)
LABELS = {"half of the labels drawn anew": 0.5, "true labels": 0.0}
COLORS = {0.3: "green", 0.6: "blue", 1.0: "purple"}
THEORY, AROUND = 0.25, 0.05
POINTS = 60


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each kind of labels."""
    amounts = {"steps": 3000, "seeds": 5} if budget == "quick" else {"steps": 30_000, "seeds": 10}
    return [{"labels": labels, **amounts} for labels in LABELS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train every seed at every rate by plain SGD; return the norms of the weights over training."""
    steps, seeds = options["steps"], range(options["seeds"])
    members = [(rate, seed) for rate in RATES for seed in seeds]
    own, rates = [seed for _, seed in members], torch.tensor([rate for rate, _ in members])
    stack = Copies([invariant(seed, init="small-gaussian") for seed in own])
    data = examples(sets.load("digits"), flat=True)
    at = recorded(steps)
    norms: list[list[float]] = []

    def watch(step: int) -> None:
        recorder.progress(step, steps)
        if step in at:
            norms.append([float(f"{value:.6g}") for value in as_vectors(stack.parameters).norm(dim=1).tolist()])

    stream = noisy_batches(data, own, 32, LABELS[options["labels"]])
    decayed(stack, stream, steps, lambda step: rates, watch=watch)
    columns = list(zip(*norms, strict=True))
    found = {f"{rate:g}": [columns[place * len(seeds) + seed] for seed in seeds] for place, rate in enumerate(RATES)}
    return {"at": at, "norms": found}


def recorded(steps: int) -> list[int]:
    """Return the steps after which norms are recorded, evenly in log time.

    >>> recorded(100)[:3], recorded(100)[-1]
    ([1, 2, 3], 100)
    """
    return sorted({round(steps ** (number / (POINTS - 1))) for number in range(POINTS)})


def slope(at: Sequence[int], norms: Sequence[float]) -> float:
    """Return the slope of log norm on log step over the last decade of steps.

    >>> round(slope([1, 10, 100, 1000], [5.0, 10**0.25, 100**0.25, 1000**0.25]), 6)
    0.25
    """
    chosen = [place for place, step in enumerate(at) if 10 * step >= at[-1]]
    x, y = (np.log([values[place] for place in chosen]) for values in (at, norms))
    return float(np.polyfit(x, y, 1)[0])


def slopes(part: Part) -> list[float]:
    """Return the median slope over the rates of each seed."""
    rows = [[slope(part.result["at"], [number(v) for v in row]) for row in rows] for rows in by_rate(part)]
    return [float(np.median(column)) for column in zip(*rows, strict=True)]


def by_rate(part: Part) -> list[list[list[float]]]:
    """Return the norms of all seeds for each rate, in the order of the rates."""
    return [part.result["norms"][f"{rate:g}"] for rate in RATES]


def judge(parts: Sequence[Part]) -> Judgement:
    """Where the gradient does not fade, the slope is within 0.05 of 1/4."""
    found = {part.options["labels"]: slopes(part) for part in parts}
    noisy, clean = (found[labels] for labels in LABELS)
    name = "slope of log ||w|| on log t"
    estimates = [median(name, noisy, THEORY - AROUND), median(name, noisy, THEORY + AROUND, above=False)]
    middle = sorted(clean)[(len(clean) - 1) // 2]
    return judged(
        f"Over the last decade of steps the norm of the weights grows like t^{estimates[0].value:.3f} where labels "
        f"stay noisy, and like t^{middle:.3f} with the true labels.",
        estimates,
        len(noisy),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The norms over the steps, both axes logarithmic, with a line of slope 1/4; and the effective rates."""
    panels = []
    for kind in ("norm of the weights", "effective rate"):
        for part in parts:
            at, lines = part.result["at"], []
            for rate, rows in zip(RATES, by_rate(part), strict=True):
                columns = [sorted(number(v) for v in column) for column in zip(*rows, strict=True)]
                middle = [column[(len(column) - 1) // 2] for column in columns]
                values = middle if kind.startswith("norm") else [rate / norm**2 for norm in middle]
                lines.append(Line(f"rate {rate:g}", at, values, COLORS[rate]))
            power = THEORY if kind.startswith("norm") else -2 * THEORY
            anchor = sorted(line.y[-1] for line in lines)[len(lines) // 2]  # type: ignore[type-var]
            guide = [float(anchor or 1.0) * (step / at[-1]) ** power for step in at]
            lines.append(Line("", at, guide, "ink", "dash", 1.4))
            panels.append(Panel(f"{kind}, {part.options['labels']}", tuple(lines), "step", x_log=True, y_log=True))
    sentence = "Plain SGD at constant rates; dashed: t^(1/4), and t^(-1/2) for the effective rate, lr / ||w||^2."
    return [Panels("The effective rate decays by itself", sentence, tuple(panels), columns=2)]


CLAIM = Claim(
    name="auto-schedule",
    question="why",
    title="BN makes the effective rate decay by itself",
    statement="Under plain SGD without weight decay the norm of weights in front of BN grows like t^(1/4), so that the "
    "effective rate falls like t^(-1/2), as long as the gradient does not fade.",
    source=Source(
        "Arora, Li & Lyu 2019; van Laarhoven 2017",
        "arXiv:1812.03981, arXiv:1706.05350",
        "The gradient is orthogonal to the weights, so ||w||^2 grows by lr^2 ||g||^2 a step, and the effective rate "
        "lr / ||w||^2 falls by itself; any constant rate then leads to a stationary point.",
    ),
    rule="A seed's slope is the median over the rates of the slope of log norm on log step, over the last decade of "
    "steps, with noisy labels. Confirmed if the 95% interval of the median is within 0.05 of 0.25, refuted if it is "
    "outside.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Two layers of 32 ReLUs with BN without gamma and beta, a fixed read-out, so that all that learns is "
    "invariant to its scale; digits, batches of 32, rates 0.3 to 1, small weights at the start. Half of the labels are "
    "drawn at random at every visit, so that the gradient has noise to the end; or none.",
    limits="The growth needs a gradient, at weights of norm 1, of constant length. With the true labels it may fade; "
    "they are shown, and not judged. The fixed read-out keeps the loss from falling to 0. The weights begin small and "
    "rates are high, so that the start is soon forgotten: from ||w||^4 = ||w_0||^4 + k t the slope reaches 1/4 late.",
)
