"""``accumulate``: the micro-batches of one optimiser step enter the running statistics as the one batch they are."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from batchnorm.checks import report_nonfinite
from batchnorm.errors import BatchNormError
from batchnorm.functional import normalize
from batchnorm.layers.batch import _Fast

# Turns a layer's update off like False, and yet is not the False that no_update says inside the block.
_HELD = 0
_OPEN: WeakKeyDictionary[nn.Module, accumulate] = WeakKeyDictionary()


class Moments:
    """Count, mean and biased variance per channel of everything shown so far, merged exactly in float64.

    >>> seen = Moments()
    >>> seen.add(torch.tensor([[0.0], [2.0]])), seen.add(torch.tensor([[10.0], [12.0]]))
    (True, True)
    >>> seen.count, seen.mean.item(), seen.var.item()
    (4, 6.0, 26.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.batches = 0
        self.examples = 0
        self.mean = torch.zeros(())
        self.var = torch.zeros(())

    @torch.no_grad()
    def add(self, x: Tensor) -> bool:
        """Merge a batch (Chan, Golub & LeVeque 1979), unless its moments are not finite; say whether it was.

        >>> Moments().add(torch.tensor([[1.0], [float("nan")]]))
        False
        """
        count = x.numel() // max(x.shape[1], 1)
        if count == 0:
            return True
        moments = _moments(x.detach(), count)
        if moments is None:
            return False
        mean, var = moments
        share = count / (self.count + count)
        apart = mean - self.mean.to(mean)
        self.var = (1 - share) * self.var.to(var) + share * var + share * (1 - share) * apart**2
        self.mean = self.mean.to(mean) + share * apart
        self.count += count
        self.batches += 1
        self.examples += x.shape[0]
        return True

    def unbiased(self) -> Tensor:
        """The variance as running statistics keep it.

        >>> seen = Moments()
        >>> _ = seen.add(torch.tensor([[0.0], [2.0]]))
        >>> seen.unbiased().item()
        2.0
        """
        return self.var * (self.count / max(self.count - 1, 1))


def _moments(x: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Mean and biased variance per channel in float64, or None if they are not finite."""
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # which Apple's GPUs lack
    if x.dtype == torch.float64 or count == 1:
        var, mean = torch.var_mean(x.to(wide), [0, *range(2, x.dim())], correction=0)
        return (mean, var) if bool(torch.isfinite(var).all() & torch.isfinite(mean).all()) else None
    # An update with momentum 1 leaves the moments in the buffers: ten times faster than var_mean.
    mean, var = (torch.zeros(x.shape[1], device=x.device) for _ in range(2))
    _, finite = normalize(x, mean, var, None, None, True, 1.0, 1e-5, None, None, 0.0, "accumulate")
    return (mean.to(wide), var.to(wide) * ((count - 1) / count)) if bool(finite) else None


class accumulate:
    """Let the micro-batches of one optimiser step count as one batch in the running statistics.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=1.0))
    >>> x = torch.randn(32, 4)
    >>> with accumulate(model):
    ...     for micro in x.split(8):
    ...         model(micro).sum().backward()  # the optimiser steps after this block
    >>> torch.allclose(model[1].running_mean, model[0](x).mean(0), atol=1e-6), int(model[1].num_batches_tracked)
    (True, 1)

    Without it, k micro-batches update the running statistics k times: the momentum is not the one that was set, and
    the variance misses what lies between the micro-batches. Here their moments are merged with their counts, in
    float64, and enter once, at the end of the block, with the layer's momentum; ``num_batches_tracked`` grows by one.
    It serves torch's layers as well as ours, and layers that do not update (evaluation mode, frozen) stay as they are.

    What it cannot repair: each micro-batch is still normalised by its own moments, so outputs and gradients are those
    of small batches, noisier than the full batch's. For that use larger batches, statistics synchronised over several
    devices, batch renormalisation, or a norm that does not look across examples.

    After an exception, or ``step.discard()`` (``with accumulate(model) as step``; for a step that a gradient scaler
    skips), the buffers are as they were. Inside the block they do not move, so an evaluation there sees the old ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: dict[_BatchNorm, Moments] = {}
        self._switches: list[tuple[_BatchNorm, str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._state = "new"

    def __enter__(self) -> accumulate:
        if self._state != "new":
            raise BatchNormError(
                f"this accumulation is {self._state}",
                where="accumulate",
                do="make a new one for each step",
            )
        layers = [(path, m) for path, m in self.model.named_modules() if isinstance(m, _BatchNorm)]
        for path, layer in layers:
            if layer in _OPEN:
                raise BatchNormError(
                    f"{path or 'the model'} is in another accumulation that has not ended",
                    where="accumulate",
                    do="leave that one first (its with block, or step.discard()): one step has one accumulation",
                )
        self._state = "open already"
        for _, layer in layers:
            name = "update" if isinstance(layer, _Fast) else "track_running_stats"
            old = getattr(layer, name)
            self._switches.append((layer, name, old))
            setattr(layer, name, _HELD)
            _OPEN[layer] = self
            hook = self._watcher(name, old)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "ended":  # by discard
            return
        seen = self._seen
        self.discard()
        if kind is None:
            _commit(seen)

    def discard(self) -> None:
        """End the accumulation and forget it: nothing enters the running statistics.

        >>> layer = nn.BatchNorm1d(2)
        >>> with accumulate(layer) as step:
        ...     y = layer(torch.randn(8, 2))
        ...     step.discard()
        >>> layer.running_mean
        tensor([0., 0.])
        """
        self._state, self._seen = "ended", {}
        for handle in self._handles:
            handle.remove()
        for layer, name, old in self._switches:
            setattr(layer, name, old)
            _OPEN.pop(layer, None)
        self._handles, self._switches = [], []

    def _watcher(self, name: str, old: Any) -> Any:
        """Make the hook that looks at a layer's input, if the layer would have updated its statistics."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def watch(layer: _BatchNorm, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            due = layer.training and layer.track_running_stats if old is None else old
            if name == "track_running_stats":
                due = layer.training and old
            if not due or layer.running_mean is None or type(getattr(layer, name)) is not int:
                return
            x = arguments[0] if arguments else keywords["input"]
            if isinstance(layer, _Fast) and layer.one_value == "running" and x.numel() == x.shape[1]:
                return
            if not self._seen.setdefault(layer, Moments()).add(x):
                report_nonfinite(False, getattr(layer, "nonfinite", "reject"), type(layer).__name__)

        return watch


@torch.no_grad()
def _commit(seen: dict[_BatchNorm, Moments]) -> None:
    """Let each layer's moments enter its running statistics, once; all are computed before any is written."""
    new: list[tuple[Tensor, Tensor]] = []
    for layer, moments in seen.items():
        mean, var, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if moments.count < 2 or mean is None or var is None:
            continue
        momentum = layer.momentum
        if momentum is None:  # every step so far weighs the same
            momentum = 0.0 if tracked is None else 1.0 / (float(tracked) + 1.0)
        for buffer, value in ((mean, moments.mean), (var, moments.unbiased())):
            new.append((buffer, torch.lerp(buffer.to(value), value.to(buffer.device), momentum)))
        if tracked is not None:
            new.append((tracked, tracked + 1))
    for buffer, value in new:
        buffer.copy_(value)
