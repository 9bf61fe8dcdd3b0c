"""Convert layers to "sync" and back: a layer's class gets a subclass that synchronises its statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from batchnorm.checks import report_nonfinite
from batchnorm.distributed.groups import active
from batchnorm.distributed.sums import alone
from batchnorm.errors import BatchNormError
from batchnorm.functional import moments, normalize
from batchnorm.layers.batch import Tensors, _BatchNormBase
from batchnorm.layers.channel_norms import BatchNorm
from batchnorm.layers.masked import MaskedBatchNorm
from batchnorm.layers.sync import SyncBatchNorm, Synchronised
from batchnorm.moments import Moments

TORCHS = torch.nn.SyncBatchNorm
LAZY = "it does not know its channels yet: run the model once, then convert"
_OWN_WAYS = ("_apply_to", "_observe", "_groups")  # what a layer of ours overrides to have statistics of its own
_SHAPES = {nn.BatchNorm1d: ((), (3,)), nn.BatchNorm2d: ((3, 3),), nn.BatchNorm3d: ((2, 2, 2),)}


def synchronise(layer: _BatchNorm, path: str, group: Any) -> str:
    """Exchange the layer's class for a synchronised one, or say why not.

    >>> layer = nn.BatchNorm2d(4)
    >>> synchronise(layer, "bn1", None), type(layer).__name__
    ('', 'SyncBatchNorm2d')
    """
    cls = type(layer)
    reason = _unfit(layer)
    if reason:
        return reason
    if cls is TORCHS:
        own = vars(layer).pop("process_group", None)
        layer.__class__ = SyncBatchNorm
        layer._was = TORCHS  # type: ignore[assignment]
        layer.process_group = own if group is None else group
    else:
        # A masked layer needs more than a batch to be tried, and is known to be fit.
        if _forwards_itself(cls) and cls is not MaskedBatchNorm:
            reason = _tried(layer)
            if reason:
                return reason
        layer.__class__ = synchronised(cls)
        layer.process_group = group  # type: ignore[assignment]
    layer._path = path  # type: ignore[assignment]
    return ""


def _unfit(layer: _BatchNorm) -> str:
    cls = type(layer)
    if isinstance(layer, Synchronised):
        return "it is synchronised already"
    if isinstance(layer, _LazyNormBase):
        return LAZY
    if isinstance(layer, TORCHS) and cls is not TORCHS:
        return f"{cls.__name__} is a subclass of torch's SyncBatchNorm, whose exchange cannot be replaced"
    if isinstance(layer, _BatchNormBase) and layer.per_step:
        return "it keeps statistics for every time step, which are not exchanged"
    if isinstance(layer, _BatchNormBase):
        own = [name for name in _OWN_WAYS if getattr(cls, name) is not getattr(_BatchNormBase, name)]
        return f"a {cls.__name__} has statistics of its own ({', '.join(own)}), not the batch's" if own else ""
    taken = [name for name in (*_BatchNormBase.additions, "learn", "dimensions") if hasattr(layer, name)]
    return f"{cls.__name__} has attributes that mean something else in ours: {', '.join(taken)}" if taken else ""


def separate(layer: _BatchNorm) -> str:
    """Give the layer the class it had, or say why not.

    >>> separate(nn.BatchNorm2d(4))
    'it is not synchronised'
    """
    cls = type(layer)
    if cls is TORCHS:
        vars(layer).pop("process_group", None)
        layer.__class__ = BatchNorm
        return ""
    if not isinstance(layer, Synchronised):
        return "it is not synchronised"
    was = getattr(layer, "_was", None)
    if was is None and cls is not SyncBatchNorm:
        return f"{cls.__name__} is a custom class"
    for name in ("_held", "_path", "_was"):
        vars(layer).pop(name, None)
    plain: Any = BatchNorm if was is None or was is TORCHS else was
    layer.__class__ = plain
    return ""


_made: dict[type[_BatchNorm], type[_BatchNorm]] = {}


def synchronised(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    """Return the subclass of a BN class that does the same with the statistics of all ranks.

    >>> synchronised(nn.BatchNorm2d).__mro__[1:3]
    (<class 'torch.nn.modules.batchnorm.BatchNorm2d'>, <class 'batchnorm.layers.sync.SyncBatchNorm'>)

    Ours stands between the class and torch's ``_BatchNorm``: what the class overrides stays, and its
    ``super().forward`` arrives at ours.
    """
    if cls in _made:
        return _made[cls]
    body: dict[str, Any] = {"_was": cls, "__reduce_ex__": _reduce, "__doc__": cls.__doc__, "__module__": __name__}
    # Our own classes normalise by `_apply_to` or not at all.
    if _forwards_itself(cls) and not issubclass(cls, _BatchNormBase):

        def forward(self: Any, *given: Any, **named: Any) -> Any:
            vars(self)["_ran"] = False
            try:
                with _Redirected(self):
                    out = cls.forward(self, *given, **named)
            finally:
                ran = vars(self).pop("_ran")
            if not ran and self.training and active(self._held, made.__name__) is not None:
                raise BatchNormError(
                    f"the forward of {cls.__name__} did not come to its normalisation in this call, so that its "
                    "statistics were not those of all ranks",
                    where=made.__name__,
                    do="convert the model back, or let it normalise by super().forward in training",
                )
            return out

        def _apply_to(self: Any, *given: Any) -> Any:
            # Its own use of F.batch_norm, where that is the path taken, is not to be redirected to it.
            vars(self).update(_busy=True, _ran=True)
            try:
                return super(made, self)._apply_to(*given)
            finally:
                del vars(self)["_busy"]

        body |= {"forward": forward, "_apply_to": _apply_to}
    made: Any = type(f"Sync{cls.__name__}", (cls, SyncBatchNorm), body)
    _made[cls] = made
    return _made[cls]


def _forwards_itself(cls: type[_BatchNorm]) -> bool:
    return cls.forward not in (_BatchNorm.forward, _BatchNormBase.forward)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the class it was: the one it has exists in this process only."""
    return _empty, (self._was,), vars(self)


def _empty(cls: type[_BatchNorm]) -> _BatchNorm:
    return synchronised(cls).__new__(synchronised(cls))


class _Redirected(TorchFunctionMode):
    """While a class's own forward runs, ``F.batch_norm`` of this layer's parameters is this layer's own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.batch_norm or "_busy" in vars(self.layer):
            return func(*args, **(kwargs or {}))
        return _redirect(self.layer, *args, **(kwargs or {}))


def _redirect(
    layer: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if weight is not layer.weight or bias is not layer.bias or eps != layer.eps:  # another layer's
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    y: Tensor
    held = Tensors(weight, bias, running_mean, running_var)
    y, finite = layer._apply_to(input, None, held, training, momentum, None)
    if finite is not None and not torch.compiler.is_compiling():
        report_nonfinite(finite, layer.nonfinite, type(layer).__name__)
    return y


def _tried(layer: _BatchNorm) -> str:
    """Try a class with a forward of its own as two ranks would run it; say what went wrong, if anything."""
    name = type(layer).__name__
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        problem = ""
        for shape in trial_shapes(layer):
            try:
                problem = _tried_on(layer, shape)
            except Exception as error:
                problem = f"{name} could not be tried on a batch: {type(error).__name__}: {error}"
            if not problem:
                return ""
        return problem


def trial_shapes(layer: _BatchNorm) -> tuple[tuple[int, ...], ...]:
    """Return the positions that a layer of this class may take.

    >>> trial_shapes(nn.BatchNorm1d(3))
    ((), (3,))
    """
    return next((shapes for kind, shapes in _SHAPES.items() if isinstance(layer, kind)), ((3, 3), ()))


def trial_batch(layer: _BatchNorm, shape: tuple[int, ...]) -> Tensor:
    """Return a small random batch for a layer, in float64.

    >>> trial_batch(nn.BatchNorm1d(3), (5,)).shape
    torch.Size([8, 3, 5])
    """
    device = next((tensor.device for tensor in (layer.weight, layer.running_mean) if tensor is not None), None)
    return torch.randn(8, layer.num_features, *shape, dtype=torch.float64, device=device)


def prepared(layer: nn.Module) -> Any:
    """Return a copy to try things on: in float64, in training mode, without hooks, and without chance.

    >>> prepared(nn.BatchNorm1d(3).eval()).training
    True
    """
    hooks = (held for m in layer.modules() for name, held in vars(m).items() if "_hooks" in name)
    without = {id(held): type(held)() for held in hooks if isinstance(held, dict)}  # what hooks hold is not copied
    twin = copy.deepcopy(layer, without).train().double()
    for child in twin.children():  # what drops at random would differ from run to run
        child.eval()
    return twin


def _tried_on(layer: _BatchNorm, shape: tuple[int, ...]) -> str:
    name = type(layer).__name__
    x = trial_batch(layer, shape)
    stock, twin = prepared(layer), prepared(layer)
    expected = stock(x.clone())
    twin.__class__ = synchronised(type(layer))
    seen: list[Moments] = []
    known: list[Moments] = []

    def apply(
        x: Tensor, residual: Any, held: Tensors, training: bool, momentum: float, mask: Any
    ) -> tuple[Tensor, Any]:
        vars(twin)["_ran"] = True
        weight, bias, mean, var, _ = held
        if training:
            seen.append(known[0] if known else moments(x, mask=mask))
        return normalize(
            x, mean, var, weight, bias, training, momentum, twin.eps, twin.activation, residual,
            twin.negative_slope, name, mask, moments=seen[-1] if training else None, reduce=alone if training else None,
        )  # fmt: skip

    twin._apply_to = apply
    whole = twin(x.clone())
    if len(seen) != 1:
        if seen:
            return f"{name} normalises {len(seen)} times"
        return f"{name} does not normalise with the batch's statistics by torch's batch_norm or ours"
    if not alike(whole, expected) or not all(alike(a, b) for a, b in zip(stock.buffers(), twin.buffers(), strict=True)):
        return f"{name} gives another output if its batch_norm is replaced"
    known.append(seen[0])
    parts = [twin(part.clone()) for part in (x[:3], x[3:])]
    if not all(alike(part, _rows(whole, rows)) for part, rows in zip(parts, (slice(0, 3), slice(3, 8)), strict=True)):
        return f"{name} looks at the batch as a whole in other ways than by its statistics"
    return ""


def _rows(value: Any, rows: slice) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[rows], value)


def alike(a: Any, b: Any) -> bool:
    """Whether two outputs, tensors or containers of them, are equal up to rounding.

    >>> alike(torch.ones(1), (torch.ones(1),))
    True
    """
    first: list[Tensor] = []
    second: list[Tensor] = []
    tree_map_only(Tensor, first.append, a)
    tree_map_only(Tensor, second.append, b)
    return bool(first) and len(first) == len(second) and all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-7, atol=1e-9)
        for x, y in zip(first, second, strict=True)
    )  # fmt: skip
