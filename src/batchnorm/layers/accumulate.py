"""``accumulate``: the micro-batches of one optimiser step enter the running statistics as the one batch they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from batchnorm.checks import check_model, report_nonfinite
from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.functional import moments
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.foreign import hold, is_foreign
from batchnorm.moments import Moments, merged, update_running

# Turns a layer's update off like False, and yet is not the False that no_update says inside the block.
_HELD = 0
_OPEN: WeakKeyDictionary[nn.Module, accumulate] = WeakKeyDictionary()


class AccumulatedMoments:
    """The moments of all that was shown, merged exactly in float64.

    >>> seen = AccumulatedMoments()
    >>> seen.add(torch.tensor([[0.0], [2.0]])), seen.add(torch.tensor([[10.0], [12.0]]))
    (True, True)
    >>> seen.count, seen.moments.mean.item(), seen.moments.var.item()
    (4, 6.0, 26.0)
    """

    def __init__(self) -> None:
        self.moments: Moments | None = None
        self.count = 0
        self.examples = 0

    @torch.no_grad()
    def add(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Merge a batch with what was there, unless its moments are not finite; say whether they were.

        >>> AccumulatedMoments().add(torch.tensor([[1.0], [float("nan")]]))
        False
        """
        part = moments(x.detach(), mask=mask)
        count = int(part.count)
        if not bool(torch.isfinite(part.mean).all() & torch.isfinite(part.var).all()):
            return False
        if count:
            if self.moments is not None:
                old = (tensor.to(part.mean.device) for tensor in self.moments)
                part = merged(Moments(*(torch.stack(pair) for pair in zip(old, part, strict=True))))
            self.moments = part
        self.count += count
        self.examples += x.shape[0]
        return True


def shown(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Pick the input and the mask, if any, out of what a layer is called with.

    >>> shown(nn.BatchNorm1d(2), (), {"input": torch.zeros(1, 2)})
    (tensor([[0., 0.]]), None)
    """
    wanted = signature(layer.forward)
    given: dict[str, Any] = {}
    for name, value in wanted.bind(*arguments, **keywords).arguments.items():
        kind = wanted.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:  # a forward that passes on whatever it is given
            given |= {f"{name}[{place}]": each for place, each in enumerate(value)}
        elif kind is Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    x = given["input"] if "input" in given else next(iter(given.values()))  # a subclass may call it something else
    return x, given.get("mask")


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
    Layers whose statistics are shared by several processes exchange them once, at the end of the block.

    What it cannot repair: each micro-batch is still normalised by its own moments, so outputs and gradients are those
    of small batches, noisier than the full batch's. For that use larger batches, statistics synchronised over several
    devices, batch renormalisation, or a norm that does not look across examples.

    After an exception, or ``step.discard()`` (``with accumulate(model) as step``; for a step that a gradient scaler
    skips), the buffers are as they were. Inside the block they do not move, so an evaluation there sees the old ones.
    """

    def __init__(self, model: nn.Module) -> None:
        check_model(model, "accumulate")
        self.model = model
        self._seen: dict[_BatchNorm, AccumulatedMoments] = {}
        self._switches: list[tuple[_BatchNorm, str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._releases: list[Callable[[], None]] = []
        self._state = "new"

    def __enter__(self) -> accumulate:
        if self._state != "new":
            raise BatchNormError(
                f"this accumulation is {self._state}",
                where="accumulate",
                do="make a new one for each step",
            )
        layers = [(path, m) for path, m in self.model.named_modules() if isinstance(m, _BatchNorm)]
        stepwise = [path for path, layer in layers if isinstance(layer, _BatchNormBase) and layer.per_step]
        if stepwise:
            warnings.warn(
                f"accumulate: {stepwise[0]} keeps statistics for every time step, which each micro-batch updates, as "
                "without accumulate",
                BatchNormWarning,
                stacklevel=2,
            )
        layers = [(path, layer) for path, layer in layers if path not in stepwise]
        for path, layer in layers:
            if layer in _OPEN:
                raise BatchNormError(
                    f"{path or 'the model'} is in another accumulation that has not ended",
                    where="accumulate",
                    do="leave that one first (its with block, or step.discard()): one step has one accumulation",
                )
        self._state = "open already"
        for _, layer in layers:
            name = "update" if isinstance(layer, _BatchNormBase) else "track_running_stats"
            old = getattr(layer, name)
            self._switches.append((layer, name, old))
            setattr(layer, name, _HELD)
            _OPEN[layer] = self
            hook = self._watcher(name, old)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            if is_foreign(layer):  # its forward may not read the switch
                self._releases.append(hold(layer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "ended":  # by discard
            return
        seen = self._seen
        # Ranks that share their statistics exchange them here, also for a layer that saw nothing on this one.
        for layer, _, old in self._switches:
            if (
                isinstance(layer, _BatchNormBase)
                and layer.training
                and old is not False
                and layer.running_mean is not None
            ):
                seen.setdefault(layer, AccumulatedMoments())
        layers = [layer for layer, _, _ in self._switches]
        self.discard()
        if kind is None:
            _commit({layer: seen[layer] for layer in layers if layer in seen})

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
        for release in self._releases:
            release()
        for layer, name, old in self._switches:
            setattr(layer, name, old)
            _OPEN.pop(layer, None)
        self._handles, self._releases, self._switches = [], [], []

    def _watcher(self, name: str, old: Any) -> Any:
        """Make the hook that looks at a layer's input, if the layer would have updated its statistics."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def watch(layer: _BatchNorm, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if _OPEN.get(layer) is not self:  # a copy that was made inside the block: it belongs to no block
                if type(getattr(layer, name)) is int:
                    setattr(layer, name, old)
                return
            due = layer.training and layer.track_running_stats if old is None else old
            if name == "track_running_stats":
                due = layer.training and old
            if not due or layer.running_mean is None or type(getattr(layer, name)) is not int:
                return
            x, mask = shown(layer, arguments, keywords)
            if isinstance(layer, _BatchNormBase) and layer.one_value == "running" and layer._has_one_value(x, mask):
                return
            if not self._seen.setdefault(layer, AccumulatedMoments()).add(x, mask):
                report_nonfinite(False, getattr(layer, "nonfinite", "reject"), type(layer).__name__)

        return watch


def _commit(seen: dict[_BatchNorm, AccumulatedMoments]) -> None:
    """Let the moments of each layer enter its running statistics, once."""
    for layer, all_of_it in seen.items():
        mean, var, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if mean is None or var is None:
            continue
        whole, _ = of_all_ranks(layer, all_of_it)
        if int(whole.count) < 2:
            continue
        momentum = layer.momentum
        if momentum is None:  # every step so far weighs the same
            momentum = 0.0 if tracked is None else 1.0 / (float(tracked) + 1.0)
        moved = update_running(mean, var, Moments(*(t.to(mean.device) for t in whole)), momentum)
        if tracked is not None:
            tracked.add_(moved)


def of_all_ranks(layer: _BatchNorm, seen: AccumulatedMoments) -> tuple[Moments, float]:
    """Return the moments and the number of examples, those of all processes if the layer shares its statistics.

    >>> seen = AccumulatedMoments()
    >>> of_all_ranks(nn.BatchNorm1d(1), seen)[1], seen.add(torch.tensor([[0.0], [2.0]]))
    (0.0, True)
    >>> of_all_ranks(nn.BatchNorm1d(1), seen)[1]
    2.0
    """
    zeros = torch.zeros(layer.num_features, dtype=torch.float64)
    own = seen.moments or Moments(zeros.new_zeros(()), zeros, zeros)
    whole = layer._of_all(own) if isinstance(layer, _BatchNormBase) else own
    if not seen.count:  # how many values an example has, only the others know
        return whole, float(whole.count)
    return whole, seen.examples * float(whole.count) / seen.count
