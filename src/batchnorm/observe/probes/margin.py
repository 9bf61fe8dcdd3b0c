"""``probe.margin``: how far an input must be moved before the network predicts another class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.preserve import untouched
from batchnorm.records import Measurement
from batchnorm.report.sections import Line, Panel, Panels, Table, short

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
OVERSHOOT = 0.02  # a step to the boundary of the linearised network stops just short of it, so it goes a little further


@dataclass(frozen=True, repr=False)
class Margin(ProbeResult):
    """The length of the smallest change that was found for every example, and the changed examples.

    ``distances`` are infinite where no change was found in the given number of steps; 0 where the example was called
    something else than its label to begin with. They are upper bounds: a smaller change may exist.
    """

    distances: Tensor
    changed: Tensor

    @property
    def median(self) -> float:
        """The middle distance."""
        return float(self.distances.median())

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records."""
        return (Measurement("adversarial distance", setting, tuple(self.distances.tolist())),)

    def picture(self) -> Panels:
        """Draw the share of examples whose class a change of a given length changes."""
        found = sorted(value for value in self.distances.tolist() if math.isfinite(value))
        every = max(len(self.distances), 1)
        steps = [(x, share / every) for at, x in enumerate(found) for share in (at, at + 1)]
        lost = len(self.distances) - len(found)
        never = f" For {lost} of {every} none was found." if lost else ""
        quarters = [short(float(self.distances.double().quantile(q, interpolation="lower"))) for q in QUANTILES]
        return Panels(
            f"Half of the examples change class when moved by {short(self.median)}.{never}",
            "The share of examples that a change of this length, in the worst direction that was found, calls "
            "something else; the longer the better.",
            (
                Panel(
                    "examples that change class",
                    (Line("", (0.0, *(x for x, _ in steps)), (0.0, *(share for _, share in steps)), "blue"),),
                    "length of the change",
                    y_range=(0.0, 1.0),
                    percent=True,
                ),
            ),
            columns=1,
            table=Table(
                "Distances",
                "",
                ("examples", "changed", *(f"{q:.0%} rank" for q in QUANTILES)),
                ((str(every), str(len(found)), *quarters),),
                numbers=tuple(range(2 + len(QUANTILES))),
            ),
        )


def margin(model: nn.Module, x: Tensor, labels: Tensor | None = None, *, steps: int = 50, tighten: int = 20) -> Margin:
    """Look for the smallest change (Euclidean) of every example that changes its class, in evaluation mode.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # the boundary is x0 = 0
    >>> margin(model, torch.tensor([[3.0, 7.0], [-0.5, 1.0]])).distances
    tensor([3.0000, 0.5000])

    Each step goes to the nearest boundary of the network linearised where it is, as in DeepFool (Moosavi-Dezfooli et
    al., 2016); then the segment back to the example is bisected ``tighten`` times. ``labels`` default to what the model
    says. One backward pass for each class and step. The model is as it was afterwards.
    """
    if steps < 1 or tighten < 0:
        raise BatchNormError(
            f"steps is {steps} and tighten {tighten}", where="margin", do="give whole numbers from 1 and 0 up"
        )
    with untouched(model), torch.no_grad():
        model.eval()
        scores = model(x)
        if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != len(x) or scores.shape[1] < 2:
            raise BatchNormError(
                "the model must return one row of class scores for each example",
                where="margin",
                do="wrap it so that model(x) is (examples, classes)",
            )
        goal = scores.argmax(1) if labels is None else labels.to(scores.device)
        there = x.detach().clone()
        changed = scores.argmax(1) != goal
        for _ in range(steps):
            if bool(changed.all()):
                break
            active = ~changed
            there[active] += _towards(model, there[active], goal[active]) * (1 + OVERSHOOT)
            changed[active] = model(there[active]).argmax(1) != goal[active]
        low = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        high = torch.ones_like(low)
        way = there - x
        shape = (-1,) + (1,) * (x.dim() - 1)
        for _ in range(tighten):
            middle = (low + high) / 2
            other = model(x + middle.view(shape) * way).argmax(1) != goal
            high = torch.where(other, middle, high)
            low = torch.where(other, low, middle)
        nearest = x + high.view(shape) * way
    distances = (nearest - x).flatten(1).norm(dim=1)
    return Margin(torch.where(changed, distances, float("inf")), nearest)


def _towards(model: nn.Module, x: Tensor, goal: Tensor) -> Tensor:
    """The step to the nearest boundary of the linearised network."""
    with torch.enable_grad():
        inputs = x.detach().requires_grad_()
        scores = model(inputs)
        ahead = scores.gather(1, goal.view(-1, 1)) - scores  # by how much the class leads each other one
        slopes = torch.stack(
            [torch.autograd.grad(ahead[:, c].sum(), inputs, retain_graph=True)[0] for c in range(scores.shape[1])]
        )
    squares = slopes.flatten(2).square().sum(2).T  # examples, classes
    lead = ahead.detach()
    distance = lead.abs() / squares.sqrt()
    distance = torch.where(
        (squares > 0) & (torch.arange(lead.shape[1], device=x.device) != goal.view(-1, 1)), distance, torch.inf
    )
    nearest = distance.argmin(1)
    rows = torch.arange(len(x), device=x.device)
    factor = (lead[rows, nearest] / squares[rows, nearest]).nan_to_num(0.0, 0.0, 0.0)
    step: Tensor = -slopes[nearest, rows] * factor.view((-1,) + (1,) * (x.dim() - 1))
    return step
