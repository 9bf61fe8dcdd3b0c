"""Record nonlinearities as they run: how much signal they pass on, and which of them feed a layer with weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.overrides import TorchFunctionMode

from batchnorm.graph import plain

FLAT = 0.01  # this near to an end of its range (as a share of it) a sigmoid has less than 4 % of its steepest slope
KINDS: dict[type[nn.Module], str] = {nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.ReLU: "relu"}
READERS: tuple[type[nn.Module], ...] = (nn.Linear, _ConvNd)
# What hands a signal on: what reads the result of these, reads the nonlinearity.
CARRIERS: tuple[type[nn.Module], ...] = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten, nn.Identity, _MaxPoolNd, _AvgPoolNd,
    _AdaptiveMaxPoolNd, _AdaptiveAvgPoolNd,
)  # fmt: skip
_READ = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_CARRY = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "contiguous", "boolean_dispatch", "fn",
}  # fmt: skip


@dataclass
class ActivationOutput:
    """The output of one nonlinearity."""

    path: str
    kind: str
    examples: int
    units: int
    flat: float  # the share of values in the flat ends (sigmoid, tanh)
    dead: float  # the share of units that are zero for all examples and positions (ReLU)
    varies: float  # the root mean square over units of the standard deviation between examples


def measure(path: str, kind: str, y: Tensor) -> ActivationOutput:
    """Measure the output of a nonlinearity.

    >>> import torch
    >>> measure("act", "tanh", torch.tensor([[3.0, 0.0], [-3.0, 0.0]]).tanh()).flat
    0.5
    >>> measure("act", "relu", torch.tensor([[3.0, 0.0], [1.0, 0.0]])).dead
    0.5
    """
    y = y.detach()
    flat = dead = 0.0
    units = y.shape[1] if y.dim() > 1 else 1
    if kind == "relu":
        if y.dim() > 1 and y.numel():
            # Units are channels, or the last axis of a sequence: the lesser share is certain.
            axes = {1, y.dim() - 1} if y.dim() == 3 else {1}
            shares = []
            for axis in axes:
                rest = [d for d in range(y.dim()) if d != axis]
                shares.append((float((y.amax(rest) <= 0).float().mean()), y.shape[axis]))
            dead, units = min(shares)
        return ActivationOutput(path, kind, y.shape[0] if y.dim() else 1, units, 0.0, dead, 1.0)
    if y.numel():
        low, high = (-1.0, 1.0) if kind == "tanh" else (0.0, 1.0)
        near = FLAT * (high - low)
        flat = float(((y < low + near) | (y > high - near)).float().mean())
    varies = float(y.float().std(0).square().mean().sqrt()) if y.dim() > 1 and len(y) > 1 else 1.0
    return ActivationOutput(path, kind, y.shape[0] if y.dim() else 1, units, flat, dead, varies)


class Following:
    """Remembers which tensors are outputs of a nonlinearity, by weak references.

    >>> import torch
    >>> following = Following()
    >>> y = torch.randn(4, 3).relu()
    >>> following.made(y, measure("act", "relu", y))
    >>> following.of(y.flatten()).path
    'act'
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], ActivationOutput]] = []

    def made(self, y: Tensor, signal: ActivationOutput) -> None:
        """Remember a result."""
        self._known = [entry for entry in self._known if entry[0]() is not None and entry[0]() is not y]
        self._known.append((weakref.ref(y), signal))

    def of(self, x: Any) -> ActivationOutput | None:
        """Return the nonlinearity that a tensor, or what it is a view of, came from."""
        if not isinstance(x, Tensor):
            return None
        for known, signal in reversed(self._known):
            if known() is x or (x._base is not None and known() is x._base):
                return signal
        return None

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


class Listening(TorchFunctionMode):
    """Records nonlinearities, modules and functions alike, whose outputs layers with weights read.

    ``read`` is called with the signal of each. Hooks on the model's modules tell it which one is running (`paths`).
    """

    def __init__(self, model: nn.Module, read: Callable[[ActivationOutput], None]) -> None:
        super().__init__()
        self._read, self._following = read, Following()
        self._inside: list[str] = [""]
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, given, path=path: self._inside.append(path))
            module.register_forward_hook(lambda module, given, result: self._leave(), always_call=True)

    def _leave(self) -> None:
        if len(self._inside) > 1:
            self._inside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Inspect the inputs and outputs of every torch function."""
        named = dict(kwargs or {})
        name = plain(getattr(func, "__name__", ""))
        x = args[0] if args else named.get("input")
        before = self._following.of(x) if name in _READ or name in _CARRY else None
        result = func(*args, **named)
        if before is not None and name in _READ:
            self._read(before)
        elif before is not None and isinstance(result, Tensor):
            self._following.made(result, before)
        elif name in KINDS.values() and isinstance(result, Tensor) and result.dtype.is_floating_point:
            self._following.made(result, measure(self._inside[-1], name, result))
        return result


def worst(signals: list[ActivationOutput]) -> Iterator[ActivationOutput]:
    """Combine several measurements of the same nonlinearities into one each: what held every time.

    >>> first, second = (ActivationOutput("act", "relu", 8, 4, 0.0, share, 1.0) for share in (0.5, 0.25))
    >>> [signal.dead for signal in worst([first, second])]
    [0.25]
    """
    by_place: dict[tuple[str, str], list[ActivationOutput]] = {}
    for signal in signals:
        by_place.setdefault((signal.path, signal.kind), []).append(signal)
    for (path, kind), own in by_place.items():
        yield ActivationOutput(
            path, kind, sum(s.examples for s in own), own[0].units, min(s.flat for s in own), min(s.dead for s in own),
            max(s.varies for s in own),
        )  # fmt: skip
