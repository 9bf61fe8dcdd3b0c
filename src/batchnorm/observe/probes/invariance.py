"""``probe.invariance``: which rescalings and shifts of weights and data leave a network's output as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.preserve import untouched
from batchnorm.records import Measurement
from batchnorm.report.sections import Line, Panel, Panels, Table, short

LEAST = 1e-9  # of a change that is drawn, on a logarithmic axis
TRANSFORMATIONS = (
    "weight matrix rescaled",
    "weight matrix recentred",
    "weight vector rescaled",
    "data set rescaled",
    "data set recentred",
    "single case rescaled",
)


@dataclass(frozen=True, repr=False)
class Invariance(ProbeResult):
    """For every transformation, the largest change of the output as a share of its largest number."""

    changes: dict[str, float]
    tolerance: float

    @property
    def holds(self) -> dict[str, bool]:
        """Which transformations leave the output as it is."""
        return {name: change <= self.tolerance for name, change in self.changes.items()}

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records."""
        return tuple(
            Measurement("change of the output", {**setting, "transformation": name}, (change,))
            for name, change in self.changes.items()
        )

    def picture(self) -> Panels:
        """Draw a row for each transformation: how far the output moved, on a logarithmic axis."""
        names, rows = tuple(self.changes), range(len(self.changes))
        changes = [max(change, LEAST) for change in self.changes.values()]
        limit = Line("tolerance", (self.tolerance,) * 2, (-0.5, len(names) - 0.5), "ink", "dot", 1.2, named_at=0.99)
        kept = [name for name, holds in self.holds.items() if holds]
        return Panels(
            f"The output stays as it is in {len(kept)} of {len(names)} cases: {', '.join(kept) or 'none'}.",
            "The largest change of the output, as a share of its largest number, when a weight or the data are "
            f"rescaled or shifted; up to {short(self.tolerance)} (dotted) counts as none.",
            (
                Panel(
                    "change of the output",
                    (limit, Line("", changes, rows, "blue", "points", 9, named_at=0.0)),
                    "share of the largest output",
                    x_log=True,
                    y_names=names,
                ),
            ),
            columns=1,
            table=Table(
                "Changes",
                "",
                ("transformation", "change", "stays"),
                tuple((name, short(self.changes[name]), "yes" if self.holds[name] else "no") for name in names),
                numbers=(1,),
            ),
        )


def invariance(
    model: nn.Module, x: Tensor, *, layer: str, factor: float = 3.0, tolerance: float = 1e-3, seed: int = 0
) -> Invariance:
    """Try the rescalings and shifts of Ba et al. (2016), table 1, on a layer's weights and on the data.

    >>> model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    >>> found = invariance(model, torch.randn(32, 5), layer="0")
    >>> [name for name, holds in found.holds.items() if holds]
    ['weight matrix rescaled', 'weight vector rescaled', 'data set rescaled', 'data set recentred']

    ``layer`` is the path of the module whose ``weight`` (outputs first) is changed: the whole matrix by ``factor``, its
    rows all shifted by one random vector, the first row alone by ``factor``. The data set is multiplied by ``factor``,
    shifted by one random vector, and its first example alone is multiplied. The model is in the mode it is in (training
    mode shows what BN does in training) and is as it was afterwards. A small eps, or float64, makes it sharper.
    """
    module = dict(model.named_modules()).get(layer)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        raise BatchNormError(
            f"{layer!r} is not a module with a weight matrix", where="invariance", do="give the path of a linear layer"
        )
    draw = torch.Generator().manual_seed(seed)
    row = torch.randn(weight.shape[1:], generator=draw, dtype=torch.float64).to(weight) * weight.detach().std()
    move = torch.randn(x.shape[1:], generator=draw, dtype=torch.float64).to(x) * x.std()
    single = x.clone()
    single[0] *= factor

    def first_only(w: Tensor) -> Tensor:
        w = w.clone()
        w[0] *= factor
        return w

    changes_of_weight: dict[str, Callable[[Tensor], Tensor]] = {
        "weight matrix rescaled": lambda w: w * factor,
        "weight matrix recentred": lambda w: w + row,
        "weight vector rescaled": first_only,
    }
    data = {"data set rescaled": x * factor, "data set recentred": x + move, "single case rescaled": single}
    with torch.no_grad():
        before = _output(model, x)
        changes: dict[str, float] = {}
        for name, change in changes_of_weight.items():
            with _written(module, change):
                changes[name] = _apart(before, _output(model, x))
        for name, given in data.items():
            changes[name] = _apart(before, _output(model, given))
    return Invariance({name: changes[name] for name in TRANSFORMATIONS}, tolerance)


def _output(model: nn.Module, x: Tensor) -> Tensor:
    with untouched(model):
        y = model(x.clone())
    if not isinstance(y, Tensor):
        raise BatchNormError(f"the model returned a {type(y).__name__}", where="invariance", do="return one tensor")
    return y


@contextmanager
def _written(module: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change a layer's weight: the parameter itself, or what a parametrisation (weight norm) computes it from."""
    parameters = dict(module.named_parameters())
    own = parameters.get("weight", parameters.get("parametrizations.weight.original1"))
    if own is None:
        raise BatchNormError("its weight is computed from something else", where="invariance")
    before = own.detach().clone()
    try:
        own.copy_(change(before))
        yield
    finally:
        own.copy_(before)


def _apart(a: Tensor, b: Tensor) -> float:
    largest = float(a.abs().max())
    return float((a - b).abs().max()) / largest if largest else float((a - b).abs().max())
