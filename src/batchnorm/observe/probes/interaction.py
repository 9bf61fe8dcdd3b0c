"""``probe.interaction``: how much the output for one example depends on the other examples in its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.nested import tensors_in
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.preserve import untouched
from batchnorm.records import Measurement
from batchnorm.report.sections import Panel, Panels, Table, short


@dataclass(frozen=True, repr=False)
class Interaction(ProbeResult):
    """The lengths of d output_i / d input_j, examples by examples (Frobenius norms of Jacobians)."""

    matrix: Tensor

    @property
    def own(self) -> float:
        """The mean over examples of how much an output depends on its own input."""
        return float(self.matrix.diagonal().mean())

    @property
    def others(self) -> float:
        """The mean over pairs of different examples; 0 exactly where examples do not see each other."""
        size = len(self.matrix)
        return float(self.matrix.clone().fill_diagonal_(0.0).sum()) / max(size * (size - 1), 1)

    @property
    def share(self) -> float:
        """``others`` as a share of ``own``."""
        return self.others / self.own if self.own else float("nan")

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records."""
        return (
            Measurement("dependence on the own input", setting, (self.own,)),
            Measurement("dependence on another input", setting, (self.others,)),
        )

    def picture(self) -> Panels:
        """Draw the matrix: a row for each output, a column for each input."""
        rows = self.matrix.tolist()
        names = tuple(f"{number}" for number in range(1, len(rows) + 1))
        found = (
            f"An output depends {short(self.share)} times as much on another example as on its own "
            f"({short(self.others)} and {short(self.own)})."
            if self.others
            else f"No output depends on another example; on its own, by {short(self.own)}."
        )
        return Panels(
            found,
            "How much every output depends on every input: the length of its derivative. Off the diagonal, examples "
            "of one batch change each other's output; blank is 0.",
            (
                Panel(
                    "output (down) on input (across)",
                    (),
                    "example of the batch",
                    x_names=names,
                    y_names=tuple(f"output {name}" for name in names),
                    cells=tuple(map(tuple, rows)),
                ),
            ),
            columns=1,
            height=320,
            table=Table(
                "Dependence",
                "",
                ("output", *(f"input {name}" for name in names)),
                tuple((name, *map(short, row)) for name, row in zip(names, rows, strict=True)),
                numbers=tuple(range(1, len(rows) + 1)),
            ),
        )


def interaction(model: nn.Module, x: Tensor, *, directions: int = 16, seed: int = 0) -> Interaction:
    """Return how much every example's output depends on every example of its batch, in the model's mode.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> x = torch.randn(8, 3)
    >>> interaction(model.train(), x).others > 0, interaction(model.eval(), x).others
    (True, 0.0)

    An output of at most ``directions`` numbers is differentiated number by number, and the figures are exact; a larger
    one along so many random directions, which estimates them. One backward pass is needed for each example and
    direction. The model is as it was afterwards. ``model(x)`` must return one row an example (if several tensors, the
    first counts).
    """
    if x.dim() < 2 or len(x) < 2 or not x.dtype.is_floating_point:
        raise BatchNormError(
            f"x has shape {list(x.shape)} and dtype {x.dtype}",
            where="interaction",
            do="give a batch of 2 examples or more",
        )
    with untouched(model), torch.enable_grad():
        inputs = x.detach().clone().requires_grad_()
        outputs = tensors_in(model(inputs))
        if not outputs or outputs[0].shape[:1] != x.shape[:1]:
            raise BatchNormError(
                f"the model returned {list(outputs[0].shape) if outputs else 'no tensor'} for {len(x)} examples",
                where="interaction",
                do="wrap it so that it returns one row an example",
            )
        rows = outputs[0].flatten(1)
        ways = _ways(rows.shape[1], directions, seed).to(rows)
        matrix = torch.zeros(len(x), len(x), dtype=torch.float64)
        for i in range(len(x)):
            for way in ways:
                (found,) = torch.autograd.grad(rows[i] @ way, inputs, retain_graph=True, allow_unused=True)
                if found is not None:
                    matrix[i] += found.detach().flatten(1).double().square().sum(1).cpu()
    return Interaction((matrix * (rows.shape[1] / len(ways))).sqrt())


def _ways(size: int, directions: int, seed: int) -> Tensor:
    """Unit vectors: the axes, or random directions if there are too many axes."""
    if size <= directions:
        return torch.eye(size, dtype=torch.float64)
    draws = torch.randn(directions, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    units: Tensor = draws / draws.norm(dim=1, keepdim=True)
    return units
