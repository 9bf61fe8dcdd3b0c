"""``probe.landscape``: is the loss smooth along the step that training is about to take?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.observe.probes.walking import Loss, cosine, learning, norm, slope, stepped
from batchnorm.records import Measurement
from batchnorm.report.sections import Line, Panel, Panels, Table, short

FACTORS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # times the learning rate: Santurkar et al.'s range for a VGG


@dataclass(frozen=True, repr=False)
class Landscape(ProbeResult):
    """The loss and its gradient along the direction of the gradient.

    ``rates`` are the step sizes; at each, ``losses`` and the change of the gradient: its length (``changes``, the
    "gradient predictiveness" of Santurkar et al.) and the ``cosines`` to the gradient at the start. ``beta`` is the
    largest change per distance walked: the effective smoothness. Weights in front of BN can be scaled without changing
    the function, which scales gradients by 1/||w|| and beta by 1/||w||**2; so compare ``corrected_changes`` and
    ``corrected_beta``, which are multiplied by ``weight_norm`` and its square, too.
    """

    loss: float
    gradient_norm: float
    weight_norm: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    changes: tuple[float, ...]
    cosines: tuple[float, ...]
    beta: float

    @property
    def loss_range(self) -> tuple[float, float]:
        """The smallest and the largest loss along the way."""
        return min(self.losses), max(self.losses)

    @property
    def corrected_changes(self) -> tuple[float, ...]:
        """The changes of the gradient, if the weights had length 1."""
        return tuple(change * self.weight_norm for change in self.changes)

    @property
    def corrected_beta(self) -> float:
        """Beta, if the weights had length 1."""
        return self.beta * self.weight_norm**2

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records, with ``setting`` to tell them from others."""
        setting = {**setting, "rates": list(self.rates), "weight_norm": self.weight_norm}
        return (
            Measurement("loss along the gradient", setting, self.losses),
            Measurement("gradient change", setting, self.changes),
            Measurement("gradient change, corrected", setting, self.corrected_changes),
            Measurement("effective beta", setting, (self.beta,)),
            Measurement("effective beta, corrected", setting, (self.corrected_beta,)),
        )

    def picture(self) -> Panels:
        """Draw the loss, the change of the gradient and its direction along the way."""
        way = (0.0, *self.rates)
        drawn = (
            ("loss along the gradient", (self.loss, *self.losses)),
            ("change of the gradient", (0.0, *self.changes)),
            ("cosine to the gradient", (1.0, *self.cosines)),
        )
        return Panels(
            f"Effective beta {short(self.beta)} ({short(self.corrected_beta)} for weights of length 1); along the "
            f"gradient the loss is {' to '.join(map(short, self.loss_range))}.",
            "One step along the gradient, tried at several lengths. The smoother the loss, the less the gradient "
            "changes, and the nearer its cosine stays to 1.",
            tuple(Panel(title, (Line("", way, values, "blue"),), "length of the step") for title, values in drawn),
            table=Table(
                "Along the gradient",
                "",
                ("step", "loss", "gradient change", "corrected", "cosine"),
                tuple(
                    tuple(map(short, row))
                    for row in zip(
                        self.rates, self.losses, self.changes, self.corrected_changes, self.cosines, strict=True
                    )
                ),
                numbers=tuple(range(5)),
            ),
        )


def landscape(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    lr: float,
    factors: Sequence[float] = FACTORS,
    parameters: Sequence[str] | None = None,
) -> Landscape:
    """Step along the gradient by ``factors`` times the learning rate, and measure how smooth the loss is there.

    >>> import torch
    >>> bowl = nn.Linear(1, 1, bias=False)  # loss w**2: the gradient 2w changes by 2 per unit of distance
    >>> found = landscape(bowl, torch.ones(1, 1), lambda m, x: m(x).square().sum(), lr=0.1)
    >>> round(found.beta, 4)
    2.0

    ``loss(model, batch)`` returns a scalar. The model is in the mode it is in (training mode is what training sees),
    and is as it was afterwards, with its buffers. ``parameters`` names those to walk with; by default, all that learn.
    The protocol is that of Santurkar et al. (2018), section 3.2 and figure 4.
    """
    if lr <= 0 or not factors or min(factors) <= 0:
        raise BatchNormError(
            f"lr is {lr} and factors are {tuple(factors)}", where="landscape", do="give numbers above 0"
        )
    own = list(learning(model, parameters, "landscape").values())
    start, gradient = slope(model, batch, loss, own)
    length = norm(gradient)
    rates = tuple(lr * factor for factor in factors)
    losses, changes, cosines = [], [], []
    for rate in rates:
        with stepped(own, gradient, -rate):
            value, there = slope(model, batch, loss, own)
        losses.append(value)
        changes.append(norm([a - b for a, b in zip(there, gradient, strict=True)]))
        cosines.append(cosine(there, gradient))
    betas = [change / (rate * length) for change, rate in zip(changes, rates, strict=True)] if length else [0.0]
    return Landscape(start, length, norm(own), rates, tuple(losses), tuple(changes), tuple(cosines), max(betas))
