"""``fold``: Algorithm 2's last lines. BN layers disappear into the linear layers beside them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.errors import BatchNormError
from batchnorm.graph import Call, Graph, trace
from batchnorm.layers.batch import _Fast
from batchnorm.layers.channel_norms import Finish
from batchnorm.records import Change, Report
from batchnorm.transforms.verify import Forward, verify

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LINEAR = (nn.Linear,)
# In evaluation these hand on what they are given.
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def fold(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    tolerance: float | None = None,
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
    that is returned stays. The report lists what was folded into what, every BN layer that is left with the reason, and
    the largest difference in outputs, on the example and on random inputs. Above the tolerance (1e-4 of the largest
    output in float32, 1e-10 in float64) `NotEquivalent` is raised. The argument is not changed.
    """
    before = copy.deepcopy(model).eval()
    folded = copy.deepcopy(before)
    graph = trace(folded, example, forward=forward)
    work = _Folding(folded, graph)
    work.run()
    changed = set(work.touched)
    certificate = verify(
        before, folded, example, verb="fold", forward=forward, tolerance=tolerance,
        unchanged=lambda path: path not in changed,
    )  # fmt: skip
    return folded, Report(tuple(work.changes), work.left, certificate)


@dataclass(frozen=True)
class _Affine:
    """``scale * x + shift`` per channel, in float64."""

    scale: Tensor
    shift: Tensor


class _Folding:
    """One model's BN layers, each folded or left with a reason."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.changes: list[Change] = []
        self.left: dict[str, str] = {}
        self.touched: list[str] = []

    def run(self) -> None:
        norms: dict[nn.Module, str] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, _BatchNorm):
                norms.setdefault(module, path)
        if not norms:
            raise BatchNormError(
                "the model has no BN layer to fold", where="fold", do="give it a model with BatchNorm layers"
            )
        for norm, path in norms.items():
            reason = self._fold(norm, path)
            if reason:
                self.left[path] = reason

    def _fold(self, norm: nn.Module, path: str) -> str:
        """Fold one layer; return why not if it cannot be."""
        assert isinstance(norm, _BatchNorm)
        reason = _unfit(norm)
        if reason:
            return reason
        calls = self.graph.of(norm)
        if not calls:
            return "this example does not reach it"
        if any(len(call.inputs) > 1 and not isinstance(norm, _Fast) for call in calls):
            return "it is called with more than one tensor"
        affine = _affine_of(norm)
        back = self._into_the_one_before(calls, affine)
        if not isinstance(back, str):
            self._write(back, path, norm)
            return ""
        ahead = "it has an activation or a residual of its own" if _finishes(norm, calls) else ""
        into = ahead or self._into_the_one_after(calls, affine)
        if not isinstance(into, str):
            self._write(into, path, norm)
            return ""
        return f"{back}; and not into what follows: {into}"

    # ---- the layer before

    def _into_the_one_before(self, calls: list[Call], affine: _Affine) -> list[tuple[nn.Module, str, str]] | str:
        """The new weights of every layer that feeds this one, or why there are none."""
        found: dict[nn.Module, Call] = {}
        for call in calls:
            source = self._look_back(call.inputs[0])
            if isinstance(source, str):
                return source
            found.setdefault(source.target, source)
        for layer, source in found.items():
            others = [c for c in self.graph.of(layer) if not self._only_feeds(c, calls)]
            if others:
                return f"{source.name} is called {len(self.graph.of(layer))} times, and not always for this layer"
        for layer in found:
            _scale_outputs(layer, affine)
        return [(layer, source.name, "before") for layer, source in found.items()]

    def _look_back(self, value: int) -> Call | str:
        """The linear call that made a value, past what does nothing in evaluation."""
        while True:
            if self.graph.feeds_output(value):
                return "what it reads is also returned by the model"
            call = self.graph.producer(value)
            if call is None:
                return "it reads the model's input" if value in self.graph.inputs else "nothing that was seen feeds it"
            readers = self.graph.consumers(value)
            if len(readers) > 1:
                names = ", ".join(reader.name for reader in readers)
                return f"what {call.name} makes is read by several ({names})"
            if call.kind != "module":
                return f"{call.name} (a function) stands before it"
            if type(call.target) in _TRANSPARENT:
                value = call.inputs[0]
                continue
            return self._fit(call, value)

    def _fit(self, call: Call, value: int) -> Call | str:
        """The call, if its layer can take up a scale and a shift of its outputs."""
        layer, kind = call.target, type(call.target)
        if kind not in (*_CONVOLUTIONS, *_TRANSPOSED, *_LINEAR) and not _is_plain_norm(layer):
            return f"{call.name} ({kind.__name__}) stands before it"
        if self._held(layer):
            return f"the weight of {call.name} {self._held(layer)}"
        if kind in _LINEAR and len(self.graph.values[value].shape) != 2:
            return f"{call.name} is linear in the last axis, and this layer normalises axis 1"
        return call

    def _only_feeds(self, call: Call, norms: list[Call]) -> bool:
        """Whether all that a call makes goes to one of these BN calls and nowhere else."""
        value = call.outputs[0]
        while not self.graph.feeds_output(value):
            readers = self.graph.consumers(value)
            if len(readers) != 1:
                return False
            if readers[0] in norms:
                return readers[0].inputs[0] == value
            if readers[0].kind != "module" or type(readers[0].target) not in _TRANSPARENT:
                return False
            value = readers[0].outputs[0]
        return False

    def _held(self, layer: nn.Module) -> str:
        """Why a layer's weight is not its own to change; empty if it is."""
        if is_parametrized(layer) or "weight" not in layer._parameters:
            return "is parametrised"
        own = {id(p) for p in layer._parameters.values() if p is not None}
        owners = [m for m in self.model.modules() if any(id(p) in own for p in m._parameters.values())]
        return "is shared with another layer" if len(owners) > 1 else ""

    # ---- the layer after

    def _into_the_one_after(self, calls: list[Call], affine: _Affine) -> list[tuple[nn.Module, str, str]] | str:
        if len(calls) > 1:
            return "it is called several times"
        found: list[Call] = []
        values = [calls[0].outputs[0]]
        while values:
            value = values.pop()
            if self.graph.feeds_output(value):
                return "the model returns what it makes"
            readers = self.graph.consumers(value)
            for reader in readers:
                kind = type(reader.target)
                if reader.kind == "module" and kind in _TRANSPARENT:
                    values.append(reader.outputs[0])
                    continue
                if reader.kind != "module" or kind not in (*_CONVOLUTIONS, *_LINEAR):
                    return f"{reader.name} follows"
                if len(self.graph.of(reader.target)) > 1:
                    return f"{reader.name} is called several times"
                if self._held(reader.target):
                    return f"the weight of {reader.name} {self._held(reader.target)}"
                if kind in _LINEAR and len(self.graph.values[value].shape) != 2:
                    return f"{reader.name} is linear in the last axis, and this layer normalises axis 1"
                if kind in _CONVOLUTIONS and _padded(reader.target) and bool((affine.shift != 0).any()):
                    return f"{reader.name} pads with zeros, which a shift would have to reach too"
                found.append(reader)
        if not found:
            return "nothing reads what it makes"
        for reader in found:
            _scale_inputs(reader.target, affine)
        return [(reader.target, reader.name, "after") for reader in found]

    # ---- writing

    def _write(self, into: list[tuple[nn.Module, str, str]], path: str, norm: nn.Module) -> None:
        for _, name, _ in into:
            self.touched.append(name)
        self.touched.append(path)
        rest: nn.Module = nn.Identity()
        if isinstance(norm, _Fast) and (norm.activation or any(len(c.inputs) > 1 for c in self.graph.of(norm))):
            rest = Finished(activation=norm.activation, negative_slope=norm.negative_slope)
        rest.training = norm.training
        for module in self.model.modules():
            for name, child in module._modules.items():
                if child is norm:
                    module._modules[name] = rest
        # What a layer's calls are does not change, but who makes them does.
        self.graph.calls = [replace(c, target=rest) if c.target is norm else c for c in self.graph.calls]
        where = ", ".join(dict.fromkeys(f"{name} ({place} it)" for _, name, place in into))
        self.changes.append(Change(path, "folded", type(norm).__name__, f"into {where}"))


class Finished(Finish):
    """What is left of a fused layer when its normalisation is folded away: the residual and the activation.

    >>> Finished(activation="relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def _normalize(self, input: Tensor) -> Tensor:
        return input


def _unfit(norm: _BatchNorm) -> str:
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics: it depends on the batch in evaluation too"
    own = type(norm)
    known = own.__module__.startswith(("torch.nn.", "batchnorm."))
    if not known and own.forward not in (b.forward for b in own.__mro__[1:] if issubclass(b, _BatchNorm)):
        return f"its class {own.__name__} has a forward of its own"
    if isinstance(norm, _Fast) and norm.statistics == "batch":
        return "it is told to use the batch's statistics"
    if norm.running_mean.dim() != 1:
        return "it has statistics for every time step"
    return ""


def _is_plain_norm(layer: nn.Module) -> bool:
    """A BN layer that is an affine function, and has a gamma and beta to change."""
    return (
        isinstance(layer, _BatchNorm)
        and not _unfit(layer)
        and layer.weight is not None
        and layer.bias is not None
        and not (isinstance(layer, _Fast) and layer.activation)
    )


def _finishes(norm: _BatchNorm, calls: list[Call]) -> bool:
    return isinstance(norm, _Fast) and (bool(norm.activation) or any(len(call.inputs) > 1 for call in calls))


def _affine_of(norm: _BatchNorm) -> _Affine:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.detach().double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -scale * norm.running_mean.detach().double()
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return _Affine(scale, shift)


def _scale_outputs(layer: Any, affine: _Affine) -> None:
    """``layer(x)`` becomes ``scale * layer(x) + shift``."""
    weight = layer.weight.detach().double()
    scale = affine.scale.to(weight.device)
    if isinstance(layer, _TRANSPOSED):  # (in, out / groups, ...): the groups' outputs stand side by side
        inputs, width = weight.shape[:2]
        groups = layer.groups
        by_group = weight.view(groups, inputs // groups, width, *weight.shape[2:])
        factor = scale.view(groups, 1, width, *[1] * (weight.dim() - 2))
        _set(layer, "weight", (by_group * factor).view(weight.shape))
    else:
        _set(layer, "weight", weight * scale.view(-1, *[1] * (weight.dim() - 1)))
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    _set(layer, "bias", bias * scale + affine.shift.to(weight.device))


def _scale_inputs(layer: Any, affine: _Affine) -> None:
    """``layer(x)`` becomes ``layer(scale * x + shift)``."""
    weight = layer.weight.detach().double()
    scale, shift = affine.scale.to(weight.device), affine.shift.to(weight.device)
    groups = getattr(layer, "groups", 1)
    # (out, in / groups, ...): the outputs of a group read that group's inputs.
    by_group = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:])
    ones = [1] * (weight.dim() - 2)
    added = (by_group * shift.view(groups, 1, -1, *ones)).flatten(2).sum(2).view(-1)
    _set(layer, "weight", (by_group * scale.view(groups, 1, -1, *ones)).view(weight.shape))
    _set(layer, "bias", added if layer.bias is None else layer.bias.detach().double() + added)


def _set(layer: nn.Module, name: str, value: Tensor) -> None:
    old = getattr(layer, name)
    like = layer.weight if old is None else old
    assert isinstance(like, Tensor)
    new = torch.empty_like(value, dtype=like.dtype, memory_format=torch.preserve_format)
    new = new.copy_(value)
    if old is None or not isinstance(old, nn.Parameter):
        setattr(layer, name, nn.Parameter(new, requires_grad=like.requires_grad))
    else:
        with torch.no_grad():
            old.copy_(new)


def _padded(layer: Any) -> bool:
    if layer.padding_mode != "zeros":  # it pads with what it is given, shifted or not
        return False
    if isinstance(layer.padding, str):
        return bool(layer.padding != "valid" and any(k > 1 for k in layer.kernel_size))
    return any(layer.padding)
