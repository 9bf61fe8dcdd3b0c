"""``probe.boundary``: how near the units of a layer fold space to the data, and how much mini-batches shake that."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from batchnorm.calling import call_with, inputs_of
from batchnorm.errors import BatchNormError
from batchnorm.graph import trace
from batchnorm.nested import fresh
from batchnorm.observe.probes.result import ProbeResult
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Measurement
from batchnorm.report.sections import Line, Panel, Panels, Table, short
from batchnorm.transforms.measuring import no_batches, streamed

SERIES = (("without", "without BN", "vermillion"), ("centred", "centred", "sky"), ("learned", "learned", "blue"))


@dataclass(frozen=True)
class Boundary:
    """One BN layer behind a linear one: where its units switch, seen from the data.

    ``without`` is the mean distance of the data to the units' hyperplanes w.z = 0 (as far as the layer's bias goes),
    ``centred`` to w.z = mu, which the mean subtraction makes of them, ``learned`` to where beta and gamma have moved
    them, all in the space of the layer's input. ``jitter`` has, for each batch size, by how much the batch's own
    statistics shake them: the standard deviations of (mu_B - mu)/sigma and of sigma_B/sigma.
    """

    layer: str
    without: float
    centred: float
    learned: float
    jitter: dict[int, tuple[float, float]]

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures as records."""
        own = {**setting, "layer": self.layer}
        found = [
            Measurement("boundary distance", {**own, "boundary": name}, (value,))
            for name, value in (("without BN", self.without), ("centred", self.centred), ("learned", self.learned))
        ]
        for size, (mean, deviation) in self.jitter.items():
            found.append(Measurement("boundary jitter", {**own, "batch": size}, (mean, deviation), "sigma"))
        return tuple(found)


class Boundaries(ProbeResult, tuple[Boundary, ...]):
    """The layers that were measured, in the order in which they run."""

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """The figures of all layers as records."""
        return tuple(measurement for each in self for measurement in each.measurements(**setting))

    def picture(self) -> Panels:
        """Draw the distances layer by layer, and the jitter against the size of the batch."""
        layers, places = tuple(each.layer for each in self), range(len(self))
        series = [(words, color, [getattr(each, name) for each in self]) for name, words, color in SERIES]
        distances = tuple(
            line
            for words, color, values in series
            for line in (Line(words, places, values, color), Line("", places, values, color, "points", 6))
        )
        panels = [Panel("distance to the data", distances, "layer", x_names=layers)]
        sizes = sorted({size for each in self for size in each.jitter})
        if sizes:
            pairs = [[statistics.fmean(each.jitter[size][part] for each in self) for size in sizes] for part in (0, 1)]
            panels.append(
                Panel(
                    "jitter by the batch, in sigmas",
                    (
                        Line("1/√m", sizes, [size**-0.5 for size in sizes], "ink", "dot", 1.2),
                        Line("mean", sizes, pairs[0], "blue"),
                        Line("deviation", sizes, pairs[1], "green"),
                    ),
                    "examples in a batch",
                    x_log=True,
                    y_log=True,
                )
            )
        without, learned = (statistics.fmean(values) for values in (series[0][2], series[2][2]))
        return Panels(
            f"The units switch at a mean distance of {short(learned)} from the data; without BN it would be "
            f"{short(without)}.",
            "How far the data are from where a layer's units switch: without BN, with its mean alone (centred), and "
            "with gamma and beta (learned); and how much the statistics of a small batch shake that.",
            tuple(panels),
            columns=2,
            table=Table(
                "Layer by layer",
                "",
                ("layer", *(words for _, words, _ in SERIES), *(f"jitter, {size}" for size in sizes)),
                tuple(
                    (
                        each.layer,
                        *(short(getattr(each, name)) for name, _, _ in SERIES),
                        *(" / ".join(map(short, each.jitter[size])) for size in sizes),
                    )
                    for each in self
                ),
                numbers=tuple(range(1, 4 + len(sizes))),
            ),
        )


def boundary(
    model: nn.Module,
    batches: Iterable[Any] | Tensor,
    *,
    layers: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = (2, 8, 32, 128),
    draws: int = 200,
    seed: int = 0,
) -> Boundaries:
    """Measure, for every BN layer right behind a convolution or linear layer, the distance of its units to the data.

    >>> model = nn.Sequential(nn.Linear(2, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
    >>> (found,) = boundary(model, [torch.randn(256, 2) + 5])
    >>> found.centred < found.without
    True

    A unit's boundary is where its activation switches: w.z = 0 in a network without BN, w.z = mu - beta * sigma / gamma
    with it, mu and sigma being those of all the data here. The distance is |w.z - b| / ||w|| (Balestriero & Baraniuk,
    2022): the mean is the b of the least squared distance. Batches of each size are drawn from the data with
    replacement, ``draws`` times; for plain Gaussian inputs their jitter is 1/sqrt(m) and about 1/sqrt(2m).
    ``batches`` holds tensors, tuples that begin with one, or dictionaries of arguments; the model is watched in
    evaluation mode, and is as it was afterwards. ``layers`` chooses BN layers by path.
    """
    inputs = [inputs_of(model, batch, "boundary") for batch in streamed(batches, "boundary")]
    if not inputs:
        raise no_batches("boundary")
    pairs = _pairs(model, inputs[0], layers)
    seen: dict[str, list[Tensor]] = {path: [] for path in pairs}
    with untouched(model), torch.no_grad():
        model.eval()
        modules = dict(model.named_modules())
        for path in pairs:
            modules[path].register_forward_pre_hook(
                lambda module, given, path=path: seen[path].append(given[0].detach())  # type: ignore[misc]
            )
        for given in inputs:
            call_with(model, fresh(given))
    generator = torch.Generator().manual_seed(seed)
    return Boundaries(
        _measure(path, *pairs[path], torch.cat(seen[path]), batch_sizes, draws, generator) for path in pairs
    )


def _measure(
    path: str,
    layer: nn.Module,
    bn: _BatchNorm,
    given: Tensor,
    batch_sizes: Sequence[int],
    draws: int,
    generator: torch.Generator,
) -> Boundary:
    values = given.double().flatten(2) if given.dim() > 2 else given.double().unsqueeze(2)  # example, unit, position
    lengths = _lengths(layer).view(1, -1, 1)
    mean = values.mean((0, 2), keepdim=True)
    sigma = (values.var((0, 2), correction=0, keepdim=True) + bn.eps).sqrt()
    gamma = torch.ones_like(mean) if bn.weight is None else bn.weight.detach().double().view(1, -1, 1)
    beta = torch.zeros_like(mean) if bn.bias is None else bn.bias.detach().double().view(1, -1, 1)
    switch = torch.where(gamma == 0, float("nan"), mean - beta * sigma / gamma)  # gamma 0: a unit that never switches

    def distance(place: Tensor | float) -> float:
        return float(((values - place).abs() / lengths).nanmean())

    jitter: dict[int, tuple[float, float]] = {}
    for size in batch_sizes:
        found = []
        for _ in range(draws):
            batch = values[torch.randint(len(values), (size,), generator=generator)]
            found.append(
                torch.stack((
                    (batch.mean((0, 2)) - mean.flatten()) / sigma.flatten(),
                    batch.std((0, 2), correction=0) / sigma.flatten(),
                ))
            )  # fmt: skip
        spread = torch.stack(found).std(0).mean(1)
        jitter[size] = (float(spread[0]), float(spread[1]))
    return Boundary(path, distance(0.0), distance(mean), distance(switch), jitter)


def _lengths(layer: nn.Module) -> Tensor:
    """The length of every unit's weights."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach().double()
    if isinstance(layer, _ConvTransposeNd):  # inputs, outputs of each group, kernel
        groups = layer.groups
        weight = weight.view(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    lengths: Tensor = weight.flatten(1).norm(dim=1)
    return lengths


def _pairs(model: nn.Module, example: Any, layers: Sequence[str] | None) -> dict[str, tuple[nn.Module, _BatchNorm]]:
    """The BN layers whose input a linear layer alone makes."""
    with untouched(model):
        graph = trace(in_mode(model, False), example)
    found: dict[str, tuple[nn.Module, _BatchNorm]] = {}
    for call in graph.calls:
        source = graph.producer(call.inputs[0]) if call.inputs else None
        if call.kind != "module" or not isinstance(call.target, _BatchNorm) or source is None:
            continue
        if (
            source.kind == "module"
            and isinstance(source.target, (nn.Linear, _ConvNd))
            and len(graph.of(call.target)) == 1
        ):
            found[call.name] = (source.target, call.target)
    if layers is not None:
        missing = [path for path in layers if path not in found]
        if missing:
            raise BatchNormError(
                f"{missing[0]!r} is not a BN layer right behind a convolution or linear layer, called once",
                where="boundary",
                do=f"choose among {', '.join(found) or 'none: there are no such layers'}",
            )
        found = {path: found[path] for path in layers}
    if not found:
        raise BatchNormError("no BN layer stands right behind a convolution or linear layer", where="boundary")
    return found
