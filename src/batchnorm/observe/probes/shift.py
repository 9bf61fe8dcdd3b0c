"""``probe.shift``: internal covariate shift, as how far a layer's gradient moves when the layers before it step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.observe.probes.walking import Loss, cosine, learning, norm, slope, stepped
from batchnorm.preserve import untouched
from batchnorm.records import Measurement
from batchnorm.report.sections import Line, Panel, Panels, Table, short


@dataclass(frozen=True, repr=False)
class Shift(ProbeResult):
    """Of every layer, in the order in which they run: the gradient before (G) and after the others stepped (G').

    ``distances`` are ||G - G'||, ``relative`` the same as a share of ||G||, ``cosines`` those of the angle between.
    """

    layers: tuple[str, ...]
    norms: tuple[float, ...]
    distances: tuple[float, ...]
    cosines: tuple[float, ...]

    @property
    def relative(self) -> tuple[float, ...]:
        """The distances as shares of the gradients."""
        return tuple(d / n if n else float("nan") for d, n in zip(self.distances, self.norms, strict=True))

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records, one of each kind a layer."""
        found = []
        for at, layer in enumerate(self.layers):
            own = {**setting, "layer": layer}
            found.append(Measurement("shift ||G - G'||", own, (self.distances[at],)))
            found.append(Measurement("shift, relative", own, (self.relative[at],)))
            found.append(Measurement("shift, cosine", own, (self.cosines[at],)))
        return tuple(found)

    def picture(self) -> Panels:
        """Draw the relative distance and the cosine of every layer."""
        places = range(len(self.layers))
        largest = max(places, key=lambda at: -1.0 if math.isnan(self.relative[at]) else self.relative[at], default=None)
        most = "" if largest is None else f"; most in layer {self.layers[largest]}, by {short(self.relative[largest])}"
        known = [share for share in self.relative if not math.isnan(share)]
        middle = short(statistics.median(known) if known else None)
        drawn = (("||G - G'|| / ||G||", self.relative), ("cosine of G and G'", self.cosines))
        return Panels(
            f"Once the layers before it have moved, the gradient of a layer changes by {middle} of its length{most}.",
            "G is a layer's gradient, G' the one it has after the layers before it took their step; layers in the "
            "order in which they run. Less internal covariate shift is a smaller distance and a cosine nearer to 1.",
            tuple(
                Panel(
                    title,
                    (Line("", places, v, "blue"), Line("", places, v, "blue", "points", 6)),
                    "layer",
                    x_names=self.layers,
                )
                for title, v in drawn
            ),
            columns=2,
            table=Table(
                "Layer by layer",
                "",
                ("layer", "||G||", "||G - G'||", "relative", "cosine"),
                tuple(
                    (layer, *map(short, row))
                    for layer, *row in zip(
                        self.layers, self.norms, self.distances, self.relative, self.cosines, strict=True
                    )
                ),
                numbers=(1, 2, 3, 4),
            ),
        )


def shift(model: nn.Module, batch: Any, loss: Loss, *, lr: float, layers: Sequence[str] | None = None) -> Shift:
    """Compare every layer's gradient with the one it has once the layers before it have taken their step.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> found = shift(model, torch.randn(8, 3), lambda m, x: m(x).square().mean(), lr=0.1)
    >>> found.layers, found.distances[0]
    (('0', '2'), 0.0)

    A layer is a module with parameters of its own that learn; ``layers`` chooses some by path. The step of the layers
    before is plain gradient descent with ``lr``. Same batch, same random numbers; the model is as it was afterwards.
    The definition is that of Santurkar et al. (2018), section 3.1: if Batch Normalization worked by reducing internal
    covariate shift, the distances would be smaller and the cosines nearer to 1 with it.
    """
    if lr <= 0:
        raise BatchNormError(f"lr is {lr}", where="shift", do="give a number above 0")
    everything = learning(model, None, "shift")
    order = _in_order(model, batch, loss, {id(p) for p in everything.values()})
    if layers is not None:
        missing = [path for path in layers if path not in order]
        if missing:
            raise BatchNormError(
                f"{missing[0]!r} is not a module with trainable parameters, or it does not run",
                where="shift",
                do=f"choose among {', '.join(order)}",
            )
    chosen = list(order) if layers is None else [path for path in order if path in layers]
    own = list(dict.fromkeys(p for path in order for p in order[path]))
    _, gradient = slope(model, batch, loss, own)
    step = dict(zip(own, gradient, strict=True))
    norms, distances, cosines = [], [], []
    for path in chosen:
        mine = order[path]
        earlier = [p for other in list(order)[: list(order).index(path)] for p in order[other] if p not in set(mine)]
        with ExitStack() as stack:
            stack.enter_context(stepped(earlier, [step[p] for p in earlier], -lr))
            _, after = slope(model, batch, loss, mine)
        before = [step[p] for p in mine]
        norms.append(norm(before))
        distances.append(norm([a - b for a, b in zip(after, before, strict=True)]))
        cosines.append(cosine(before, after))
    return Shift(tuple(chosen), tuple(norms), tuple(distances), tuple(cosines))


def _in_order(model: nn.Module, batch: Any, loss: Loss, learns: set[int]) -> dict[str, list[Tensor]]:
    """The modules that have parameters of their own, in the order in which they are first called."""
    order: dict[str, list[Tensor]] = {}
    with untouched(model):
        for path, module in model.named_modules():
            mine: list[Tensor] = [p for p in module._parameters.values() if p is not None and id(p) in learns]
            if mine:
                module.register_forward_pre_hook(
                    lambda module, given, path=path, mine=mine: order.setdefault(path, mine) and None  # type: ignore[misc]
                )
        loss(model, batch)
    return order
