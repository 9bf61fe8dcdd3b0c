"""Operations that a scale and shift of the channels can be moved across: pooling, upsampling, reshaping, cat, sums.

BN is ``scale * x + shift`` for every channel, axis 1. Where ``f(scale * x + shift)`` is ``scale * f(x) + shift``, it
may as well stand on the other side of ``f``, and so reach a convolution or a linear layer there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from batchnorm.dataflow import Call, Graph
from batchnorm.transforms.affine import Affine

RESHAPES = frozenset({"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"})
_CATS = frozenset({"cat", "concat", "concatenate"})
_ADAPTIVE = tuple(getattr(nn, f"Adaptive{kind}Pool{n}d") for kind in ("Avg", "Max") for n in (1, 2, 3))
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_LARGESTS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
# Each repeats numbers of the same channel, or means of them with weights whose sum is one.
_SPREADS = (
    nn.Upsample, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip


def passes(graph: Graph, call: Call, affine: Affine) -> str | None:
    """Whether a scale and a shift may change places with a call: empty if so, else why not; None of other calls.

    >>> from batchnorm import trace
    >>> graph = trace(nn.Sequential(nn.AvgPool2d(2), nn.AvgPool2d(3, padding=1)), torch.randn(1, 1, 4, 4))
    >>> passes(graph, graph.calls[0], Affine(torch.ones(1), torch.ones(1)))
    ''
    >>> passes(graph, graph.calls[1], Affine(torch.ones(1), torch.ones(1)))
    '1 pads with zeros, which a shift would have to reach too'
    """
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    old, new = (graph.values[v] for v in (*call.inputs, *call.outputs))
    if old.dtype != new.dtype or min(len(old.shape), len(new.shape)) < 2 or old.shape[:2] != new.shape[:2]:
        return None
    kind, positions = _kind(call), len(old.shape) - 2
    if kind == "reshape":
        return ""  # the numbers of a channel of an example stand side by side, before and after
    if kind == "mean" and all(axis >= 2 for axis in _axes(call, len(old.shape))):
        return ""
    if kind == "spread" and positions:
        return ""
    if kind.endswith("pool") and not kind.startswith(f"{positions}"):
        return None  # it pools over another number of axes, and one of them may be that of the channels
    if kind.endswith("average pool"):
        if _option(call, "padding", 3, 0) in (0, (0,) * positions, [0] * positions) or _leaves_padding_out(call):
            return "" if _option(call, "divisor_override", 6, None) is None else None
        if bool((affine.shift == 0).all()) and _option(call, "divisor_override", 6, None) is None:
            return ""
        return f"{call.name} pads with zeros, which a shift would have to reach too"
    if kind.endswith("adaptive pool"):
        return ""
    if kind.endswith("largest pool"):  # its padding never wins
        return "" if bool((affine.scale >= 0).all()) else f"{call.name} keeps the largest, and some scales are negative"
    return None


def _kind(call: Call) -> str:
    """What a call does, in words of our own."""
    layer, name = call.target, call.name
    if call.kind == "module":
        dims = type(layer).__name__[-2:-1]
        if isinstance(layer, (nn.Flatten, nn.Unflatten)):
            return "reshape"
        if isinstance(layer, _SPREADS):
            return "spread"
        for kinds, word in ((_AVERAGES, "average"), (_LARGESTS, "largest"), (_ADAPTIVE, "adaptive")):
            if type(layer) in kinds:
                largest = word == "largest" or "Max" in type(layer).__name__
                return f"{dims}, {'largest' if largest else word} pool"
        return ""
    if name in RESHAPES:
        return "reshape"
    if name == "mean":
        return "mean"
    if name == "interpolate":
        return "spread"
    for start, word in (("avg_pool", "average"), ("max_pool", "largest"), ("adaptive_avg_pool", "adaptive"),
                        ("adaptive_max_pool", "largest")):  # fmt: skip
        if name.startswith(start) and name[len(start) :] in ("1d", "2d", "3d"):
            return f"{name[-2]}, {word} pool"
    return ""


def _option(call: Call, name: str, place: int, otherwise: Any) -> Any:
    """A setting of a call: a module's attribute, or an argument of a function."""
    if call.kind == "module":
        return getattr(call.target, name, otherwise)
    return call.options.get(name, call.options.get(str(place), otherwise))


def _leaves_padding_out(call: Call) -> bool:
    return _option(call, "count_include_pad", 5, True) is False


def _axes(call: Call, dims: int) -> list[int]:
    """The axes that a mean is taken over; -1 where that is not known."""
    given = next((call.options[slot] for slot in ("dim", "axis", "1") if slot in call.options), None)
    if given is None or isinstance(given, bool):
        return [-1]
    return [axis % dims for axis in (given if isinstance(given, (tuple, list)) else [given])]


def flattened(graph: Graph, call: Call) -> int:
    """How many numbers of each channel a call puts side by side in axis 1; 0 if that is not what it does.

    >>> from batchnorm import trace
    >>> graph = trace(nn.Sequential(nn.Flatten()), torch.randn(1, 5, 2, 3))
    >>> flattened(graph, graph.calls[0])
    6
    """
    if len(call.inputs) != 1 or len(call.outputs) != 1 or _kind(call) != "reshape":
        return 0
    old, new = (graph.values[v] for v in (*call.inputs, *call.outputs))
    if old.dtype != new.dtype or len(old.shape) < 3 or len(new.shape) != 2 or old.shape[0] != new.shape[0]:
        return 0
    return math.prod(old.shape[2:])


def keeps_rows(graph: Graph, call: Call) -> bool:
    """Whether a call only rearranges the rows of a tensor: each keeps its values, in the last axis.

    >>> from batchnorm import trace
    >>> graph = trace(nn.Sequential(nn.Flatten(0, 1)), torch.randn(2, 3, 4))
    >>> keeps_rows(graph, graph.calls[0])
    True
    """
    if _kind(call) != "reshape" or len(call.inputs) != 1 or len(call.outputs) != 1:
        return False
    old, new = (graph.values[v] for v in (*call.inputs, *call.outputs))
    return old.dtype == new.dtype and bool(old.shape and new.shape) and old.shape[-1] == new.shape[-1]


def moved(graph: Graph, call: Call, axis: int, backwards: bool) -> int | None:
    """Where a call that exchanges axes brings one of them to (or, backwards, has it from); None of other calls.

    >>> from batchnorm import trace
    >>> class Turned(nn.Module):
    ...     def forward(self, x):
    ...         return x.permute(0, 3, 1, 2)
    >>> graph = trace(Turned(), torch.zeros(2, 3, 4, 5))
    >>> moved(graph, graph.calls[0], 1, backwards=True), moved(graph, graph.calls[0], 1, backwards=False)
    (3, 2)
    """
    if call.kind != "function" or len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    dims = len(graph.values[call.inputs[0]].shape)
    given = [call.options[slot] for slot in ("dim0", "dim1", "dims", "1", "2", "3", "4", "5") if slot in call.options]
    flat = [item for each in given for item in (each if isinstance(each, (tuple, list)) else [each])]
    if not flat or not all(isinstance(item, int) for item in flat):
        return None
    order = list(range(dims))  # of each axis of the result: which axis it was
    if call.name in ("transpose", "swapaxes", "swapdims") and len(flat) == 2:
        a, b = (item % dims for item in flat)
        order[a], order[b] = order[b], order[a]
    elif call.name == "permute" and sorted(item % dims for item in flat) == order:
        order = [item % dims for item in flat]
    else:
        return None
    return order[axis] if backwards else order.index(axis)


def parts(graph: Graph, call: Call, affine: Affine) -> list[tuple[int, Affine]] | None:
    """What the values that a call joins have to become, so that its result is scaled and shifted; None of other calls.

    >>> from batchnorm import trace
    >>> class Joined(nn.Module):
    ...     def forward(self, a, b):
    ...         return torch.cat([a, b], 1)
    >>> graph = trace(Joined(), (torch.ones(1, 1), torch.ones(1, 2)))
    >>> found = parts(graph, graph.calls[0], Affine(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)))
    >>> [(value, part.scale) for value, part in found]
    [(0, tensor([1.])), (1, tensor([2., 3.]))]
    """
    shapes = [graph.values[v].shape for v in call.inputs]
    alike = call.kind == "function" and len({graph.values[v].dtype for v in (*call.inputs, *call.outputs)}) == 1
    if not alike or len(call.outputs) != 1 or len(call.inputs) < 2:
        return None
    made = graph.values[call.outputs[0]].shape
    if call.name == "add" and len(call.arguments) == 2 and not call.options and all(s == made for s in shapes):
        # Of a sum the scale goes to both, the shift to one of them.
        return [(call.inputs[0], affine), (call.inputs[1], Affine(affine.scale, torch.zeros_like(affine.shift)))]
    sizes = _cat_sizes(graph, call)
    if sizes is None:
        return None
    pairs = zip(call.inputs, *(torch.split(t, sizes) for t in (affine.scale, affine.shift)), strict=True)
    return [(value, Affine(scale, shift)) for value, scale, shift in pairs]


def joined(graph: Graph, call: Call, value: int, affine: Affine) -> Affine | None:
    """What becomes of a cat of the channels if one of the values in it is scaled and shifted; None of other calls.

    >>> from batchnorm import trace
    >>> class Joined(nn.Module):
    ...     def forward(self, a, b):
    ...         return torch.cat([a, b], 1)
    >>> graph = trace(Joined(), (torch.ones(1, 1), torch.ones(1, 2)))
    >>> joined(graph, graph.calls[0], 0, Affine(torch.tensor([2.0]), torch.tensor([5.0])))
    Affine(scale=tensor([2., 1., 1.]), shift=tensor([5., 0., 0.]))
    """
    sizes = _cat_sizes(graph, call)
    if sizes is None or len({graph.values[v].dtype for v in (*call.inputs, *call.outputs)}) != 1:
        return None
    start = sum(sizes[: call.inputs.index(value)])
    scale, shift = affine.scale.new_ones(sum(sizes)), affine.shift.new_zeros(sum(sizes))
    scale[start : start + len(affine.scale)] = affine.scale
    shift[start : start + len(affine.shift)] = affine.shift
    return Affine(scale, shift)


def _cat_sizes(graph: Graph, call: Call) -> list[int] | None:
    """How many channels each value in a cat has; None if the call is not a cat of channels, each value once."""
    if call.kind != "function" or call.name not in _CATS or len(call.outputs) != 1:
        return None
    made = graph.values[call.outputs[0]].shape
    given = next((call.options[slot] for slot in ("dim", "axis", "1") if slot in call.options), 0)
    shapes = [graph.values[v].shape for v in call.inputs]
    if len(made) < 2 or given % len(made) != 1 or any(len(s) != len(made) for s in shapes):
        return None
    sizes = [shape[1] for shape in shapes]
    return sizes if sum(sizes) == made[1] else None  # a value that stands in it twice is listed once
