"""Find the linear layers before and after a BN layer that can absorb its scale and shift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from batchnorm.dataflow import Call, Graph
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.transforms.affine import CONVOLUTIONS, LINEAR, Affine, axes_of, is_norm, is_plain, unfit
from batchnorm.transforms.passing import flattened, joined, keeps_rows, moved, parts, passes


@dataclass(frozen=True)
class Piece:
    """A call of a linear layer, and what is to happen to its output (or its input)."""

    call: Call
    affine: Affine


class Neighbours:
    """The ways from a BN layer to linear layers, along one run of a model from which BN layers disappear."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.graph = graph
        self.rest: dict[nn.Module, nn.Module] = {}  # of a layer that went: what stands in its place
        self.holders: dict[nn.Module, list[tuple[nn.Module, str]]] = {}  # of a module: who has it, under which name
        self.owners: dict[int, int] = {}  # of a parameter: how many modules have it
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self.holders.setdefault(child, []).append((module, name))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.owners[id(tensor)] = self.owners.get(id(tensor), 0) + 1
        self.path_of = {id(t): path for path, t in [*model.named_parameters(), *model.named_buffers()]}

    # ---- the layers before

    def before(self, call: Call, affine: Affine, route: set[str]) -> list[Piece] | str:
        """The linear calls that made what a BN call reads, or why there are none; ``route``: what lies between."""
        value = main(call)
        assert value is not None
        if list(call.arguments.values()).count(value) > 1:
            return f"what it reads is its residual, too ({call.name})"
        return self._look_back(value, affine, route)

    def _look_back(self, value: int, affine: Affine, route: set[str]) -> list[Piece] | str:
        """Go back past what does nothing in evaluation, and what a scale and a shift pass through."""
        axis, turned = 1, ""  # that of the channels, and what last moved it
        while True:
            if self.graph.feeds_output(value):
                return "the model also returns what it reads"
            call = self.graph.producer(value)
            if call is None:
                return "it reads the model's input" if value in self.graph.inputs else "nothing that was seen feeds it"
            readers = self.graph.consumers(value)
            if len(readers) > 1:
                return f"what {call.name} makes is read by several ({few(reader.name for reader in readers)})"
            route.add(call.name)
            step = self._step(call, axis, affine, backwards=True)
            if isinstance(step, str):
                return f"{call.name} stands before it: {step}"
            if step is None:
                break
            if step != axis:
                turned = call.name
            value, axis = call.inputs[0], step
        if axis != 1 and not (call.kind == "module" and isinstance(call.target, LINEAR)):
            return f"{turned} (a function) stands before it"
        if call.kind != "module":
            return self._joined(call, affine, route)
        if call.target in self.rest:
            return f"the activation or residual of {call.name} stands before it"
        reason = self._unfit(call) or self.held(call) or self._off_axis(call, value, axis)
        return reason or [Piece(call, affine)]

    def _step(self, call: Call, axis: int, affine: Affine, backwards: bool) -> int | str | None:
        """On which axis the channels are beyond a call that a scale and a shift pass; why not; None if it is no such.

        They are on axis 1, as BN has them, or the last, as linear layers do.
        """
        if self.transparent(call):
            return axis
        passed = passes(self.graph, call, affine) if axis == 1 else None
        if passed is not None:
            return passed or axis
        if keeps_rows(self.graph, call):
            old, new = (len(self.graph.values[v].shape) for v in (*call.inputs, *call.outputs))
            if axis == (new if backwards else old) - 1:
                return (old if backwards else new) - 1
        return moved(self.graph, call, axis, backwards)

    def _joined(self, call: Call, affine: Affine, route: set[str]) -> list[Piece] | str:
        """What stands before a cat or a sum, if all of it is linear."""
        found: list[Piece] = []
        for value, part in parts(self.graph, call, affine) or [(-1, affine)]:
            pieces = "" if value < 0 else self._look_back(value, part, route)
            if isinstance(pieces, str):
                return f"{call.name} (a function) stands before it" + (f", and {pieces}" if pieces else "")
            found += pieces
        return found

    def _unfit(self, call: Call) -> str:
        """Why a layer cannot take up a scale and a shift of its outputs; empty if it can."""
        layer = call.target
        norm_alone = is_norm(layer) and not unfit(layer) and not finishes(layer, self.graph.of(layer))
        return "" if norm_alone or is_plain(layer) else f"{call.name} ({type(layer).__name__}) stands before it"

    def _off_axis(self, call: Call, value: int, axis: int) -> str:
        """Why an axis of a value, which BN normalises, is not that of a layer's channels; empty if it is."""
        dims = len(self.graph.values[value].shape)
        if isinstance(call.target, LINEAR):
            fits = axis == dims - 1
            return "" if fits else f"{call.name} is linear in the last axis, and this layer normalises axis {axis}"
        if axis != 1:
            return f"{call.name} has its channels on axis 1, and this layer normalises axis {axis}"
        fits = dims == axes_of(call.target) or is_norm(call.target)
        return "" if fits else f"{call.name} is used without a batch axis, and this layer normalises axis 1"

    # ---- the layers after

    def after(self, call: Call, affine: Affine, route: set[str]) -> list[Piece] | str:
        """The linear calls that read what a BN call makes, all of them, or why that cannot be."""
        found: dict[int, Piece] = {}
        waiting = [(call.outputs[0], 1, affine)]
        route.add(call.name)
        while waiting:
            value, axis, part = waiting.pop()
            if self.graph.feeds_output(value):
                return "the model returns its output"
            for reader in self.graph.consumers(value):
                further = self._further(reader, value, axis, part)
                if isinstance(further, str):
                    return further
                if further is not None:
                    waiting.append((reader.outputs[0], *further))
                    route.add(reader.name)
                    continue
                reason = self._cannot_read(reader, value, axis, part)
                if reason:
                    return reason
                if reader.index in found:
                    return f"{reader.name} reads it twice"
                found[reader.index] = Piece(reader, part)
        return list(found.values()) or "nothing reads its output"

    def _further(self, reader: Call, value: int, axis: int, affine: Affine) -> tuple[int, Affine] | str | None:
        """What becomes of the scale and the shift behind a reader that they pass, and on which axis; None of others."""
        if len(reader.outputs) != 1:
            return None
        step = self._step(reader, axis, affine, backwards=False) if len(reader.inputs) == 1 else None
        if step is not None:
            return step if isinstance(step, str) else (step, affine)
        times = flattened(self.graph, reader) if axis == 1 else 0
        if times:
            return 1, Affine(affine.scale.repeat_interleave(times), affine.shift.repeat_interleave(times))
        cat = joined(self.graph, reader, value, affine) if axis == 1 else None
        return None if cat is None else (1, cat)

    def _cannot_read(self, reader: Call, value: int, axis: int, affine: Affine) -> str:
        """Why a layer cannot take up a scale and a shift of what it reads; empty if it can."""
        layer = reader.target
        if reader.kind != "module" or not isinstance(layer, (*CONVOLUTIONS, *LINEAR)) or not is_plain(layer):
            return f"{reader.name} follows"
        if len(self.graph.of(layer)) > 1:
            return f"{reader.name} is called several times"
        if padded(layer) and bool((affine.shift != 0).any()):
            return f"{reader.name} pads with zeros, which a shift would have to reach too"
        return self.held(reader) or self._off_axis(reader, value, axis)

    # ---- layers

    def transparent(self, call: Call) -> bool:
        """Whether a call hands on what it is given, now that some layers are gone."""
        return call.passes or (call.kind == "module" and type(self.rest.get(call.target)) is nn.Identity)

    def held(self, call: Call) -> str:
        """Why a layer's weights may not change; empty if they may."""
        layer = call.target
        if layer._forward_hooks or layer._forward_pre_hooks:
            return f"{call.name} has hooks, which would see other numbers"
        readers = self.functions_reading(layer)
        return f"the weight of {call.name} is also read by {readers}" if readers else ""

    def shared(self, layer: nn.Module) -> list[tuple[str, Any]]:
        """The parameters and buffers of a layer that other layers have, too."""
        own = [*layer._parameters.items(), *layer._buffers.items()]
        return [(name, t) for name, t in own if t is not None and self.owners.get(id(t), 1) > 1]

    def functions_reading(self, module: nn.Module) -> str:
        """The functions outside of a module that read its parameters or buffers."""
        own = (*module._parameters.values(), *module._buffers.values())
        paths = [self.path_of[id(t)] for t in own if id(t) in self.path_of]  # a bias that we added is not there
        return few(call.name for path in paths for call in self.graph.readers_of(path))

    def put(self, old: nn.Module, new: nn.Module) -> None:
        """Have a module stand in another's place, wherever that was."""
        places = self.holders.pop(old, [])
        for holder, name in places:
            holder._modules[name] = new
        self.holders.setdefault(new, []).extend(places)


def main(call: Call) -> int | None:
    """The value that a BN call normalises."""
    return call.arguments.get("0", call.arguments.get("input"))


def finishes(norm: nn.Module, calls: list[Call]) -> bool:
    """Whether more than BN happens in a layer: an activation, a residual, submodules of a user's class."""
    if isinstance(norm, _BatchNormBase) and (norm.activation or any(len(call.arguments) > 1 for call in calls)):
        return True
    return any(type(child) is not nn.Identity for child in norm.children())  # also of a class that was converted


def padded(layer: Any) -> bool:
    """Whether a layer pads with zeros.

    >>> padded(nn.Conv2d(3, 4, 3, padding=1)), padded(nn.Conv2d(3, 4, 1, padding="same"))
    (True, False)
    """
    if getattr(layer, "padding_mode", "") != "zeros":  # it pads with what it is given, shifted or not; or is linear
        return False
    if isinstance(layer.padding, str):
        return bool(layer.padding != "valid" and any(k > 1 for k in layer.kernel_size))
    return any(layer.padding)


def few(names: Iterable[str]) -> str:
    """Names for a sentence: each once, and not too many.

    >>> few(["a", "b", "a", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    each = list(dict.fromkeys(names))
    return ", ".join(each[:4]) + (f" and {len(each) - 4} more" if len(each) > 4 else "")
