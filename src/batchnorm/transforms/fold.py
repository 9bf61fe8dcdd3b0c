"""``fold``: Algorithm 2's last lines. BN layers disappear into the linear layers beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from batchnorm.dataflow import Call, Graph
from batchnorm.errors import BatchNormError
from batchnorm.graph import check_ready, trace
from batchnorm.layers.batch import _Fast
from batchnorm.records import Change, Report
from batchnorm.transforms.affine import (
    CONVOLUTIONS,
    LINEAR,
    Affine,
    Finished,
    New,
    affine_of,
    axes_of,
    finish_of,
    is_norm,
    is_plain,
    lost_in,
    scaled_inputs,
    scaled_outputs,
    unfit,
    write,
)
from batchnorm.transforms.verify import Forward, verify


def fold(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    tolerance: float | None = None,
    leave: Iterable[str] = (),
) -> tuple[nn.Module, Report]:
    """Return the inference network: BN folded into the layers beside it, wherever that is exact.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> folded, report = fold(model, torch.randn(2, 3, 8, 8))
    >>> folded
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
      (2): ReLU()
    )

    With fixed statistics BN is ``scale * x + shift`` per channel. That goes into the convolution, transposed
    convolution (grouped too) or linear layer before it, if nothing else reads what that layer makes; or into the one
    after it, where that is exact (a linear layer; a convolution without padding); or into another BN layer before it.
    What was fused into a layer of ours (activation, residual) stays in its place.

    The model is watched for one run with ``example`` (see `batchnorm.trace`), in evaluation mode, in which the copy
    that is returned stays. A model that takes other ways for other inputs is folded along the way that this one took.
    The report lists what was folded into what, every BN layer that is left with the reason, and the largest difference
    in outputs, on the example and on random inputs. Above the tolerance (1e-4 of the largest output in float32, 1e-10
    in float64) `NotEquivalent` is raised. The argument is not changed. ``leave`` names BN layers that are to stay.
    """
    check_ready(model, "fold")
    before = _copy_of(model).eval()
    folded = _copy_of(before)
    work = _Folding(folded, trace(folded, example, forward=forward, opaque=lambda m: is_norm(m) or is_plain(m)))
    work.run(frozenset(leave))
    seen = {call.name for call in work.graph.calls if call.kind == "module"}
    certificate = verify(
        before, folded, example, verb="fold", forward=forward, tolerance=tolerance,
        unchanged=lambda path: path in seen and path not in work.altered,
    )  # fmt: skip
    return folded, Report(tuple(work.changes), work.left, certificate)


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise BatchNormError(
            f"the model cannot be copied ({error})", where="fold", do="make copy.deepcopy(model) work"
        ) from error  # fmt: skip


class _Folding:
    """One model's BN layers, each folded or left with a reason."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.changes: list[Change] = []
        self.left: dict[str, str] = {}
        self.rest: dict[nn.Module, nn.Module] = {}  # of a folded layer: what stands in its place
        self.altered: set[str] = set()  # modules that now give something else than before
        self.owners: dict[int, int] = {}  # of a parameter: how many modules have it
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.owners[id(tensor)] = self.owners.get(id(tensor), 0) + 1
        self.path_of = {id(t): path for path, t in [*model.named_parameters(), *model.named_buffers()]}

    def run(self, leave: frozenset[str]) -> None:
        """Fold what can be, in the order of the run, until nothing more can: one fold may open the way for another."""
        norms = {module: path for path, module in self.model.named_modules() if is_norm(module)}
        scripted = {
            path: "it is scripted: fold the model before torch.jit.script"
            for path, module in self.model.named_modules()
            if "BatchNorm" in str(getattr(module, "original_name", ""))
        }
        if not norms and not scripted:
            raise BatchNormError(
                "the model has no BN layer to fold", where="fold", do="give it a model with BatchNorm layers"
            )
        for path in leave:
            if self.graph.modules.get(path) not in norms:
                raise BatchNormError(
                    f"there is no BN layer {path!r} to leave", where="fold", do=f"use one of {_few(norms.values())}"
                )
        kept = {self.graph.modules[path] for path in leave}
        first = {norm: calls[0].index if (calls := self.graph.of(norm)) else len(self.graph.calls) for norm in norms}
        waiting = sorted((norm for norm in norms if norm not in kept), key=first.__getitem__)
        reasons: dict[nn.Module, str] = dict.fromkeys(kept, "it was to be left")
        progress = True
        while waiting and progress:
            reasons.update({norm: self._fold(norm, norms[norm]) for norm in waiting})
            progress = any(not reasons[norm] for norm in waiting)
            waiting = [norm for norm in waiting if reasons[norm]]
        self.left = {path: reasons[norm] for norm, path in norms.items() if reasons[norm]} | scripted

    def _fold(self, norm: nn.Module, path: str) -> str:
        """Fold one layer; return why not if it cannot be."""
        calls = self.graph.of(norm)
        reason = unfit(norm) or self._awkward(norm, calls)
        if reason:
            return reason
        affine = affine_of(norm)
        if not affine.finite:
            return "its statistics, gamma or beta are not finite, or the variance is negative"
        back = self._into_the_one_before(calls, affine)
        if not isinstance(back, str):
            self._write(back, "before", norm, path)
            return ""
        own = "it has an activation or a residual of its own" if _finishes(norm, calls) else ""
        ahead = own or self._into_the_one_after(calls, affine)
        if not isinstance(ahead, str):
            self._write(ahead, "after", norm, path)
            return ""
        return f"{back}; nor into what follows: {ahead}"

    def _awkward(self, norm: nn.Module, calls: list[Call]) -> str:
        """Why the way a layer is used forbids taking it away."""
        if not calls:
            return "this example does not reach it"
        if any(set(call.arguments) - {"0", "input"} and not isinstance(norm, _Fast) for call in calls):
            return "it is called with more than one tensor"
        if any("mask" in call.arguments or "2" in call.arguments for call in calls):
            return "it is called with a mask"
        if any(_main(call) is None for call in calls):
            return "what it is given is not a tensor of its own"
        readers = self._functions_reading(norm)
        return f"its numbers are also read by {readers}" if readers else ""

    def _functions_reading(self, module: nn.Module) -> str:
        """The functions outside of a module that read its parameters or buffers."""
        own = (*module._parameters.values(), *module._buffers.values())
        paths = [self.path_of[id(t)] for t in own if id(t) in self.path_of]  # a bias that we added is not there
        return _few(call.name for path in paths for call in self.graph.readers_of(path))

    def _transparent(self, call: Call) -> bool:
        """Whether a call hands on what it is given, now that some layers are gone."""
        return call.passes or (call.kind == "module" and type(self.rest.get(call.target)) is nn.Identity)

    def _keeps_rows(self, call: Call) -> bool:
        """Whether a call only arranges the rows of a tensor anew: each keeps its numbers, in the last axis."""
        if call.kind != "function" or call.name not in _RESHAPES or len(call.inputs) != 1 or len(call.outputs) != 1:
            return False
        old, new = (self.graph.values[v] for v in (*call.inputs, *call.outputs))
        return old.dtype == new.dtype and bool(old.shape and new.shape) and old.shape[-1] == new.shape[-1]

    # ---- the layer before

    def _into_the_one_before(self, calls: list[Call], affine: Affine) -> list[New] | str:
        """The new numbers of every layer that feeds this one, or why there are none."""
        found: dict[nn.Module, Call] = {}
        route: set[str] = set()
        for call in calls:
            value = _main(call)
            assert value is not None
            source = self._look_back(value, route)
            if isinstance(source, str):
                return source
            found.setdefault(source.target, source)
        for layer, source in found.items():
            if not all(self._only_feeds(call, calls) for call in self.graph.of(layer)):
                return f"{source.name} is called {len(self.graph.of(layer))} times, and not always for this layer"
        new = [scaled_outputs(layer, source.name, affine) for layer, source in found.items()]
        for change in new:
            if lost_in(change):
                return lost_in(change)
        self.altered |= route
        return new

    def _look_back(self, value: int, route: set[str]) -> Call | str:
        """The linear call that made a value, past what does nothing in evaluation."""
        normalised, reshaped = value, ""
        while True:
            if self.graph.feeds_output(value):
                return "the model also returns what it reads"
            call = self.graph.producer(value)
            if call is None:
                return "it reads the model's input" if value in self.graph.inputs else "nothing that was seen feeds it"
            readers = self.graph.consumers(value)
            if len(readers) > 1:
                return f"what {call.name} makes is read by several ({_few(reader.name for reader in readers)})"
            route.add(call.name)
            if self._transparent(call):
                value = call.inputs[0]
                continue
            if self._keeps_rows(call):
                value, reshaped = call.inputs[0], call.name
                continue
            if reshaped and not (call.kind == "module" and isinstance(call.target, LINEAR)):
                return f"{reshaped} (a function) stands before it"
            if call.kind != "module":
                return f"{call.name} (a function) stands before it"
            if call.target in self.rest:
                return f"the activation or residual of {call.name} stands before it"
            return self._fit(call, normalised)

    def _fit(self, call: Call, value: int) -> Call | str:
        """The call, if its layer can take up a scale and a shift of its outputs."""
        layer = call.target
        kind = type(layer).__name__
        if is_norm(layer):
            if unfit(layer) or _finishes(layer, self.graph.of(layer)):
                return f"{call.name} ({kind}) stands before it"
        elif not is_plain(layer):
            return f"{call.name} ({kind}) stands before it"
        return self._held(call) or self._off_axis(call, value) or call

    def _off_axis(self, call: Call, value: int) -> str:
        """Why axis 1, which BN normalises, is not the axis of a layer's channels; empty if it is."""
        dims, shape = axes_of(call.target), self.graph.values[value].shape
        if not dims or len(shape) == dims:
            return ""
        if isinstance(call.target, LINEAR):
            return f"{call.name} is linear in the last axis, and this layer normalises axis 1"
        return f"{call.name} is used without a batch axis, and this layer normalises axis 1"

    def _only_feeds(self, call: Call, norms: list[Call]) -> bool:
        """Whether all that a call makes goes to one of these BN calls and nowhere else."""
        value = call.outputs[0]
        while not self.graph.feeds_output(value):
            readers = self.graph.consumers(value)
            if len(readers) != 1:
                return False
            if readers[0] in norms:
                return _main(readers[0]) == value and list(readers[0].arguments.values()).count(value) == 1
            if not (self._transparent(readers[0]) or self._keeps_rows(readers[0])):
                return False
            value = readers[0].outputs[0]
        return False

    def _held(self, call: Call) -> str:
        """Why a layer's weights are not its own to change; empty if they are."""
        layer = call.target
        own = [t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None]
        if any(self.owners.get(id(t), 1) > 1 for t in own):
            return f"{call.name} shares its weight with another layer"
        if layer._forward_hooks or layer._forward_pre_hooks:
            return f"{call.name} has hooks, which would see other numbers"
        readers = self._functions_reading(layer)
        return f"the weight of {call.name} is also read by {readers}" if readers else ""

    # ---- the layer after

    def _into_the_one_after(self, calls: list[Call], affine: Affine) -> list[New] | str:
        if len(calls) > 1:
            return "it is called several times"
        found: dict[nn.Module, Call] = {}
        route = {calls[0].name}
        values = [calls[0].outputs[0]]
        while values:
            value = values.pop()
            if self.graph.feeds_output(value):
                return "the model returns what it makes"
            for reader in self.graph.consumers(value):
                if self._transparent(reader):
                    values.append(reader.outputs[0])
                    route.add(reader.name)
                    continue
                reason = self._cannot_read(reader, value, affine)
                if reason:
                    return reason
                found[reader.target] = reader
        if not found:
            return "nothing reads what it makes"
        new = [scaled_inputs(layer, reader.name, affine) for layer, reader in found.items()]
        for change in new:
            if lost_in(change):
                return lost_in(change)
        self.altered |= route
        return new

    def _cannot_read(self, reader: Call, value: int, affine: Affine) -> str:
        """Why a layer cannot take up a scale and a shift of what it reads; empty if it can."""
        layer = reader.target
        if reader.kind != "module" or not isinstance(layer, (*CONVOLUTIONS, *LINEAR)) or not is_plain(layer):
            return f"{reader.name} follows"
        if len(self.graph.of(layer)) > 1:
            return f"{reader.name} is called several times"
        if _padded(layer) and bool((affine.shift != 0).any()):
            return f"{reader.name} pads with zeros, which a shift would have to reach too"
        return self._held(reader) or self._off_axis(reader, value)

    # ---- writing

    def _write(self, into: list[New], place: str, norm: nn.Module, path: str) -> None:
        for change in into:
            write(change)
        rest: nn.Module = nn.Identity()
        if isinstance(norm, _Fast) and _finishes(norm, self.graph.of(norm)):
            rest = Finished(activation=norm.activation, negative_slope=norm.negative_slope)
        elif not isinstance(norm, _Fast):
            rest = finish_of(norm) or rest
        self.rest[norm] = rest.eval()
        for module in self.model.modules():
            for name, child in module._modules.items():
                if child is norm:
                    module._modules[name] = rest
        where = ", ".join(f"{change.name} ({place} it)" for change in into)
        self.changes.append(Change(path, "folded", type(norm).__name__, f"into {where}"))


_RESHAPES = frozenset({"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"})


def _main(call: Call) -> int | None:
    """The value that a BN call normalises."""
    return call.arguments.get("0", call.arguments.get("input"))


def _finishes(norm: nn.Module, calls: list[Call]) -> bool:
    """Whether more than BN happens in a layer: an activation, a residual, submodules of a class of somebody's own."""
    if isinstance(norm, _Fast):
        return bool(norm.activation) or any(len(call.arguments) > 1 for call in calls)
    return any(True for _ in norm.children())


def _padded(layer: Any) -> bool:
    if getattr(layer, "padding_mode", "") != "zeros":  # it pads with what it is given, shifted or not; or is linear
        return False
    if isinstance(layer.padding, str):
        return bool(layer.padding != "valid" and any(k > 1 for k in layer.kernel_size))
    return any(layer.padding)


def _few(names: Iterable[str]) -> str:
    """Names for a sentence: each once, and not too many."""
    each = list(dict.fromkeys(names))
    return ", ".join(each[:4]) + (f" and {len(each) - 4} more" if len(each) > 4 else "")
