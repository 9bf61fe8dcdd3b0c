"""BN over the wrong axis: it normalises positions, and leaves the features as they are.

## What it does
Finds BN layers whose input has its features on the last axis (it comes from a linear layer, an embedding or a recurrent
layer over a sequence, with nothing in between that moves axes), and BN layers whose input was meant to be
transposed but was reshaped. If a linear layer takes the model's own input, either axis may be the features': then it
measures which share of the variance lies between features and which between positions.

## Why is this bad?
BN's channels are axis 1. For (batch, time, features), ``BatchNorm1d`` takes the time steps for channels: it runs if
``num_features`` happens to be the length of the sequences. Then each step is normalised over all features, which stay
as different as they were, and a sequence of another length raises.
``x.view(n, c, t)`` of an (n, t, c) tensor has the right shape and the wrong numbers.

## Example
```python
nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20))(torch.randn(32, 20, 16))  # 20 steps, and 20 features
```

## Use instead
```python
y = bn1d(linear(x).transpose(1, 2)).transpose(1, 2)
nn.LayerNorm(20)  # which normalises the last axis
```

## Fix safety
No automatic fix: only the model's author knows which axis was meant.

## References
- DCASE-REPO/dcase2018_baseline#18
- sharathadavanne/seld-dcase2021#8
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from batchnorm.dataflow import Call, Graph
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.preserve import in_mode
from batchnorm.records import Finding
from batchnorm.transforms.insert import _ACTIVATION_MODULES, _ACTIVATIONS

_SAME_SHAPE_MODULES = (*_ACTIVATION_MODULES, _DropoutNd, nn.Identity, _BatchNorm)
_SAME_SHAPE = {
    *_ACTIVATIONS,
    "dropout",
    "add",
    "sub",
    "mul",
    "div",
    "truediv",
    "contiguous",
    "clone",
    "detach",
    "float",
    "to",
}
_LAST = (nn.Embedding, nn.RNNBase, nn.LayerNorm, MultiheadAttention)  # make sequences with the features last, always
_RESHAPES = {"view", "reshape"}
FACTOR, SHARE = 2.0, 0.02  # of the variance between features, against that between positions


def look(subject: Subject) -> Iterator[Finding]:
    """Follow every BN layer's input back to what made it, and measure along which axis things differ."""
    suspects = [
        (path, layer, suspect)
        for path, layer in subject.layers
        for suspect in [_suspected(subject.graph, layer)]
        if suspect
    ]
    wanted = {layer for _, layer, _ in suspects} | {suspect.first for _, _, suspect in suspects}
    inputs = _inputs(subject, wanted) if suspects else {}
    for path, layer, suspect in suspects:
        x = inputs.get(layer)
        if x is None:
            continue
        source = inputs.get(suspect.first, x)
        features, positions = _between(source, source.dim() - 1), _between(source, 1)
        shape = tuple(x.shape)
        numbers: dict[str, Any] = {"shape": list(shape), "features_share": features, "positions_share": positions}
        if suspect.reshaped:
            yield RULE.found(
                path,
                f"its input {shape} is a reshaped output of {suspect.maker}, which has its features last: a view mixes "
                "features and positions, it does not transpose",
                "transpose(1, 2) instead of view or reshape", **numbers,
            )  # fmt: skip
            continue
        clear = features > max(FACTOR * positions, SHARE)
        if not suspect.sure and positions > max(FACTOR * features, SHARE):
            continue  # what differs is axis 1: those are channels, and the linear layer goes over positions
        means = ((x - x.mean(_others(x, 1), keepdim=True)) / _deviation(x)).mean(_others(x, x.dim() - 1))
        yield RULE.found(
            path,
            f"it normalises axis 1 of {shape}, the positions, not the {shape[-1]} features that {suspect.maker} makes: "
            f"behind it they still have means from {means.min():.2g} to {means.max():.2g}",
            "BN over (batch, features, positions): transpose around it; or nn.LayerNorm, which takes the last axis",
            severity=None if suspect.sure or clear else "advice", **numbers,
        )  # fmt: skip


class _Suspect(NamedTuple):
    maker: str  # of an input that has its features last
    sure: bool  # whether that is certain
    first: nn.Module | None = None  # the first linear layer, whose input tells more
    reshaped: bool = False


def _suspected(graph: Graph, layer: _BatchNorm) -> _Suspect | None:
    for call in graph.of(layer):
        value = call.inputs[0]
        shape = graph.values[value].shape
        source = _maker(graph, value) if len(shape) > 2 else None
        if source is None:
            continue
        if source.kind == "function" and source.name in _RESHAPES:
            given = graph.values[source.inputs[0]].shape
            swapped = len(given) == 3 and given[1] != given[2] and shape == (given[0], given[2], given[1])
            first = _maker(graph, source.inputs[0]) if swapped else None
            suspect = None if first is None else _features_last(graph, first)
            suspect = suspect and suspect._replace(reshaped=True)
        else:
            suspect = _features_last(graph, source)
        if suspect:
            return suspect
    return None


def _features_last(graph: Graph, call: Call) -> _Suspect | None:
    """Return what gives (batch, positions, features), and whether that is certain; None if nothing does."""
    if call.kind == "module" and isinstance(call.target, _LAST):
        return _Suspect(f"{call.name} ({type(call.target).__name__})", True)
    if call.kind == "function" and call.name == "embedding":
        return _Suspect("an embedding", True)
    linear = call.kind == "module" and isinstance(call.target, nn.Linear)
    if not linear and not (call.kind == "function" and call.name == "linear"):
        return None
    if len(graph.values[call.inputs[0]].shape) < 3:
        return None
    name, module = (f"{call.name} (Linear)", call.target) if linear else ("a linear function", None)
    before = _maker(graph, call.inputs[0])
    if before is None:  # the model's own input: axis 1 may be channels after all
        return _Suspect(name, False, module)
    suspect = _features_last(graph, before)  # whatever moves axes, or has its channels on axis 1, may mean what it does
    return suspect and suspect._replace(maker=name)


def _maker(graph: Graph, value: int) -> Call | None:
    """The call that made a value, behind everything that goes value by value; None if there is none."""
    while True:
        call = graph.producer(value)
        if call is None:
            return None
        same = isinstance(call.target, _SAME_SHAPE_MODULES) if call.kind == "module" else call.name in _SAME_SHAPE
        shape = graph.values[value].shape
        before = [
            v for v in call.inputs if graph.values[v].shape == shape and graph.values[v].source in ("call", "input")
        ]
        if not same or not before:
            return call
        made = [v for v in before if graph.values[v].producer is not None]
        value = (made or before)[0]


def _inputs(subject: Subject, wanted: set[Any]) -> dict[Any, Tensor]:
    seen: dict[Any, Tensor] = {}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].dim() > 2 and not given[0].is_meta:
            seen.setdefault(module, given[0].double())

    with subject.looking(note, lambda module: module in wanted) as model:
        subject.run(in_mode(model, False), subject.example)
    return seen


def _others(x: Tensor, axis: int) -> list[int]:
    return [d for d in range(x.dim()) if d != axis]


def _deviation(x: Tensor) -> Tensor:
    return x.var(_others(x, 1), unbiased=False, keepdim=True).clamp(min=1e-30).sqrt()


def _between(x: Tensor, axis: int) -> float:
    """Which share of the variance lies between the means along an axis, beyond what chance makes."""
    total = float(x.var(unbiased=False))
    chance = x.shape[axis] / x.numel()
    return max(0.0, float(x.mean(_others(x, axis)).var(unbiased=False)) / total - chance) if total > 0 else 0.0


RULE = Rule("BN110", "wrong-axis", "warning", __doc__, look, ("model", "example"))
