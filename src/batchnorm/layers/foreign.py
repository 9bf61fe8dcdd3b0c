"""Norms whose forward neither torch nor this package wrote: which statistics they keep, and how these are held."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from batchnorm.errors import BatchNormError

_KEPT = re.compile(r"((running|moving)_(mean|var|variance|std|inv_std)|num_batches_tracked)$")
_COUNT = "num_batches_tracked"
_HOMES = ("torch.nn.", "batchnorm.")


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in which a module itself keeps statistics of batches, by name.

    >>> list(statistics_of(nn.BatchNorm1d(2))), statistics_of(nn.BatchNorm1d(2, track_running_stats=False))
    (['running_mean', 'running_var', 'num_batches_tracked'], {})

    They are known by their names: ``running_mean``, ``running_var``, ``moving_variance`` and the like. Buffers,
    parameters that do not learn, and plain attributes count. Of a module whose own forward calls ``batch_norm``, and
    which has none of these names, all buffers and plain attributes of one dimension do. A scripted module has none: its
    tensors cannot be exchanged.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    own = {
        name: t
        for home in (module._buffers, module._parameters, vars(module))
        for name, t in home.items()
        if isinstance(t, Tensor) and not (t.requires_grad and isinstance(t, nn.Parameter))
    }
    named = {name: t for name, t in own.items() if _KEPT.match(name)}
    if named or not own or isinstance(module, _NormBase) or not _calls_batch_norm(type(module)):
        return named
    plain = {name: t for name, t in own.items() if not isinstance(t, nn.Parameter)}
    return {name: t for name, t in plain.items() if t.dim() == 1 and t.is_floating_point()}


def set_statistics(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Exchange tensors of `statistics_of` for others, wherever the module has them.

    >>> layer = nn.BatchNorm1d(2)
    >>> set_statistics(layer, {"running_mean": torch.ones(2)})
    >>> layer.running_mean
    tensor([1., 1.])
    """
    for name, tensor in tensors.items():
        homes: tuple[dict[str, Any], ...] = (module._buffers, module._parameters, vars(module))
        next(home for home in homes if name in home)[name] = tensor


def _calls_batch_norm(kind: type[nn.Module]) -> bool:
    forward = getattr(kind, "_before_frozen", kind).forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "batch_norm" in names or "native_batch_norm" in names


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module itself keeps statistics of batches, whatever its class.

    >>> keeps_statistics(nn.InstanceNorm1d(2, track_running_stats=True)), keeps_statistics(nn.GroupNorm(1, 2))
    (True, False)
    """
    return any(name != _COUNT for name in statistics_of(module))


def is_foreign(module: nn.Module) -> bool:
    """Whether a module's forward is written outside torch and this package, so that no switch is known to reach it.

    >>> class Own(nn.BatchNorm1d):
    ...     __module__ = "mine"
    ...     def forward(self, x):
    ...         return super().forward(x) * 2
    >>> is_foreign(Own(3)), is_foreign(nn.BatchNorm1d(3))
    (True, False)

    So it is for a subclass of a layer of ours, too.
    """
    own = (kind.__module__ for kind in type(module).__mro__ if "forward" in vars(kind))
    return "forward" in vars(module) or not all(home.startswith(_HOMES) for home in own)


def hold(module: nn.Module) -> Callable[[], None]:
    """Let no call of a module move its statistics, whatever its forward does; return a function that ends this.

    >>> layer = nn.BatchNorm1d(2)
    >>> release = hold(layer)
    >>> y = layer(torch.randn(8, 2))
    >>> release()
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0., 0.]), 0)

    The forward writes into copies. Inside a compiled graph nothing is held.
    """
    kept: list[dict[str, Tensor]] = []

    def before(layer: nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            kept.append(statistics_of(layer))
            set_statistics(layer, {name: tensor.clone() for name, tensor in kept[-1].items()})

    def after(layer: nn.Module, arguments: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and kept:
            set_statistics(layer, kept.pop())

    handles = (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, prepend=True, always_call=True),  # the last to hold is the first to release
    )

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


class Evaluating(nn.Module):
    """What `freeze` makes of a norm of any class: its forward runs as in evaluation, whatever ``train()`` says.

    >>> layer = nn.InstanceNorm1d(2, track_running_stats=True)
    >>> layer.__class__ = evaluating(type(layer))
    >>> x = torch.randn(8, 2, 5)
    >>> bool((layer.train()(x) == layer.eval()(x)).all()), isinstance(layer, nn.InstanceNorm1d), layer.running_mean
    (True, True, tensor([0., 0.]))

    Modules inside it, such as a dropout or an activation, follow ``train()`` as before.
    """

    _before_frozen: type[nn.Module]
    _uses_batch: bool = False  # set by `use_batch_statistics`
    _checked: bool = False  # set by `freeze` where it could not try the forward

    def _evaluate(self, *given: Any, **named: Any) -> Any:
        checked = self._checked and not self._uses_batch and not torch.compiler.is_compiling()
        before = [t.clone() for t in statistics_of(self).values()] if checked else []
        mode, self.training = self.training, self._uses_batch
        try:
            output = self._before_frozen.forward(self, *given, **named)
        finally:
            self.training = mode
        if not all(map(torch.equal, before, statistics_of(self).values())):
            raise BatchNormError(
                "its statistics moved though it is frozen: its forward updates them in evaluation, too",
                where=self._before_frozen.__name__,
                do="freeze it in its own way, and name the other layers in bn.freeze(modules=)",
            )
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy by the class it was: this one exists in this process only."""
        if self._before_frozen.__reduce_ex__ is nn.Module.__reduce_ex__:
            return _again, (self._before_frozen.__new__, (self._before_frozen,)), self.__getstate__()  # type: ignore[no-untyped-call]
        reduced: Any = self._before_frozen.__reduce_ex__(self, protocol)
        make, arguments, state, *_ = reduced
        return _again, (make, arguments), state


_MADE: dict[type[nn.Module], Any] = {}  # one class for each, so that copies are of the same


def evaluating(kind: type[nn.Module]) -> Any:
    """Return the subclass of a norm's class that runs as in evaluation.

    >>> evaluating(nn.InstanceNorm1d).__name__, evaluating(nn.InstanceNorm1d) is evaluating(nn.InstanceNorm1d)
    ('FrozenInstanceNorm1d', True)
    """
    if kind not in _MADE:

        def forward(self: Any, *given: Any, **named: Any) -> Any:
            return self._evaluate(*given, **named)

        # `forward` is of the class's own home: what it computes, only a trial can tell.
        body = {"_before_frozen": kind, "forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _MADE[kind] = type(f"Frozen{kind.__name__}", (Evaluating, kind), body)
    return _MADE[kind]


def _again(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    made = make(*arguments)
    made.__class__ = evaluating(type(made))
    return made
