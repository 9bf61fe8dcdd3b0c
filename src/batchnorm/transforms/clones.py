"""Copies of a layer that is called at several places, each before a BN layer of its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from batchnorm.dataflow import Call
from batchnorm.transforms.affine import Finished, is_norm
from batchnorm.transforms.neighbours import Neighbours, few, main

_NOTHING = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "contiguous"})


@dataclass(frozen=True)
class Clone:
    """A copy of a layer for the calls from some of the modules that hold it."""

    layer: nn.Module
    path: str
    calls: tuple[Call, ...]
    places: tuple[tuple[nn.Module, str], ...]


class Moved(Finished):
    """A layer that replaces the BN layer folded into it, with the residual and activation of that layer.

    >>> Moved(nn.Identity(), activation="relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self, layer: nn.Module, **finish: Any) -> None:
        super().__init__(**finish)
        self.layer = layer

    def _normalize(self, input: Tensor) -> Tensor:
        made: Tensor = self.layer(input)
        return made


def clone_for(near: Neighbours, layer: nn.Module, calls: list[Call]) -> Clone | str:
    """A copy for some calls of a layer, if only the modules that make them call the layer, and they hold it by name.

    That is so of a convolution that stands in several Sequentials: each can have its own.
    """
    mine = {call.index for call in calls}
    names: dict[nn.Module, list[str]] = {}
    for holder, name in near.holders.get(layer, ()):
        names.setdefault(holder, []).append(name)
    asking: dict[nn.Module, set[int]] = {}
    for call in near.graph.of(layer):
        caller = near.graph.modules[call.scope]
        if caller not in names:
            return "its calls cannot be separated by calling module"
        asking.setdefault(caller, set()).add(call.index)
    callers = [caller for caller, made in asking.items() if made & mine]
    if any(asking[caller] - mine for caller in callers):
        return "its calls cannot be separated by calling module"
    places = tuple((caller, name) for caller in callers for name in names[caller])
    path = ".".join(filter(None, [calls[0].scope, places[0][1]]))
    return Clone(copy.deepcopy(layer), path, tuple(calls), places)


def norms_after(near: Neighbours, layer: nn.Module) -> dict[nn.Module, list[Call]] | str:
    """The BN layers that all of a layer's outputs go to, if each of them reads nothing else.

    The layer can then go, and a copy of it can stand in the place of each of them, whatever the code does in between
    to decide which of them to call. What lies between must not mind that it sees the layer's input instead.
    """
    graph = near.graph
    found: dict[nn.Module, list[Call]] = {}
    for call in graph.of(layer):
        value = call.outputs[0]
        while True:
            readers = graph.consumers(value)
            if graph.feeds_output(value):
                return "the model returns its output"
            if len(readers) != 1:
                return f"its output goes to {few(reader.name for reader in readers) or 'no layer'}"
            if value in graph.measured:
                return "the model reads the size of its output"
            reader = readers[0]
            if reader.kind == "module" and is_norm(reader.target) and reader.target not in near.rest:
                if main(reader) != value or list(reader.arguments.values()).count(value) != 1:
                    return f"{reader.name} adds its output"
                found.setdefault(reader.target, []).append(reader)
                break
            if not near.transparent(reader) or (reader.kind != "module" and reader.name not in _NOTHING):
                return f"its output goes to {reader.name}"
            value = reader.outputs[0]
    for norm, calls in found.items():
        if len(calls) != len(graph.of(norm)):
            return f"{calls[0].name} does not read it alone"
    return found


def in_place_of(rest: nn.Module, layer: nn.Module) -> nn.Module:
    """A layer, and what is left of the BN layer that was folded into it.

    >>> in_place_of(nn.Sequential(nn.ReLU()), nn.Linear(2, 3))
    Sequential(
      (layer): Linear(in_features=2, out_features=3, bias=True)
      (0): ReLU()
    )
    """
    if type(rest) is nn.Identity:
        return layer
    if isinstance(rest, Finished):
        return Moved(layer, activation=rest.activation, negative_slope=rest.negative_slope).eval()
    return nn.Sequential(OrderedDict([("layer", layer), *rest.named_children()])).eval()


def memory_of(layer: nn.Module) -> str:
    """Return the memory of a layer's parameters, in words.

    >>> memory_of(nn.Linear(1024, 1, bias=False))
    '4.0 KiB'
    """
    size = sum(t.numel() * t.element_size() for t in (*layer.parameters(), *layer.buffers()))
    for unit, bytes_in_it in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_in_it:
            return f"{size / bytes_in_it:.1f} {unit}"
    return f"{size} bytes"
