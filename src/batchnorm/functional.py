"""``batch_norm`` as a function of tensors: the one place that chooses native or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from batchnorm import kernels
from batchnorm.checks import (
    NONFINITE,
    NUMBERS,
    check,
    check_dimensions,
    check_dtypes,
    check_groups,
    check_layout,
    check_numbers,
    check_statistics,
    check_tensors,
    overlap,
    report_nonfinite,
)
from batchnorm.errors import BatchNormError
from batchnorm.kernels import call, differentiable, fallback, graph_op
from batchnorm.kernels.differentiable import CODES, Rest
from batchnorm.kernels.layout import LANES, dense
from batchnorm.kernels.native import ACTIVATIONS
from batchnorm.kernels.saved import Setting
from batchnorm.kernels.storage import check_memory, fits
from batchnorm.masks import as_mask
from batchnorm.moments import Moments, merged, update_running

__all__ = ["Moments", "batch_norm", "moments"]

_PLAIN = (Tensor, torch.nn.Parameter)
_tuple = tuple.__new__
_32, _INT64 = torch.float32, torch.int64
_compiling, _tracing = torch.compiler.is_compiling, torch._C._get_tracing_state
_transforming, _dispatching = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    negative_slope: float = 0.01,
    nonfinite: str = "reject",
    mask: Tensor | None = None,
    groups: int = 1,
    moments: Moments | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Normalise each channel of ``x``, then add ``residual`` and apply ``activation``, in one pass.

    >>> x = torch.randn(8, 3, 5, 5)
    >>> y = batch_norm(x, None, None, training=True, activation="relu")
    >>> torch.allclose(y, torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True)), atol=1e-6)
    True

    The first eight arguments are ``torch.nn.functional.batch_norm``'s. With ``training`` the statistics are the
    batch's, and the running ones, if given, are updated; without, the running ones normalise. ``activation`` is one
    of relu, relu6, leaky_relu (with ``negative_slope``), silu, none. A batch whose moments are not finite never
    reaches the running statistics: ``nonfinite="reject"`` leaves them as they were and warns, ``"raise"`` raises
    `NonFiniteBatch` (in a compiled graph both only leave them).

    Four arguments say what a batch is. ``mask`` marks the positions that count (see `batchnorm.masks.as_mask`): the
    others are not looked at, and are zero in the output and in the gradients. ``groups`` splits the samples, in their
    order, into that many groups, each with statistics of its own; the running statistics are those of all of them
    together. ``moments`` are the batch's own, if they are known already. If they were merged from several processes,
    ``reduce`` adds up their backward sums: it takes a float64 tensor and returns the sum of everyone's, and
    ``moments.count`` counts everyone's values; it must be differentiable itself if a second derivative is wanted.
    """
    if nonfinite not in NONFINITE:
        raise BatchNormError(f"nonfinite is {nonfinite!r}", where="batch_norm", do="use 'reject' or 'raise'")
    y, finite = normalize(
        x, running_mean, running_var, weight, bias, training, momentum, eps, activation, residual, negative_slope,
        "batch_norm", mask, groups, moments, reduce,
    )  # fmt: skip
    if finite is not None and not torch.compiler.is_compiling():
        report_nonfinite(finite, nonfinite, "batch_norm")
    return y


@torch.no_grad()
def moments(x: Tensor, *, mask: Tensor | None = None, groups: int = 1) -> Moments:
    """Return how many values each channel has, their mean and their biased variance, in float64.

    >>> moments(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).mean
    tensor([2., 0.], dtype=torch.float64)

    With ``groups`` above 1, mean and variance have the shape (groups, channels). Nothing flows back through them: give
    them to `batch_norm` instead. An empty batch has a count, a mean and a variance of zero.
    """
    if type(x) not in _PLAIN:
        check_tensors(x, None, None, None, None, None, "moments")
    check_dimensions(x, "moments")
    check_groups(x, groups, "moments")
    if mask is not None:
        mask = _as_mask(mask, x, "moments")
    kernel = kernels.kernel()
    if kernel is None or _serves(x, None, None, None, None, None) is None or not _serves_mask(x, mask):
        check_tensors(x, None, None, None, None, None, "moments")
        found = fallback.moments(x, mask, groups)
    else:
        x, like, _ = dense(x.resolve_neg(), mask is not None)
        setting = Setting(kernel.run, like, None, True, 0.0, 0.0, 0.0, "none", groups, x.shape[0], _bytes(mask))
        both = differentiable.moments(x, setting)
        found = Moments(fallback.counts(x, mask, groups), both[:, 0], both[:, 1])
    return found if groups > 1 else Moments(found.count[0], found.mean[0], found.var[0])


def normalize(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    negative_slope: float,
    where: str = "batch_norm",
    mask: Tensor | None = None,
    groups: int = 1,
    moments: Moments | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    batches: Tensor | None = None,
) -> tuple[Tensor, Tensor | bool | None]:
    """Do what `batch_norm` does, and return the output together with what became of the running statistics.

    >>> mean, var = torch.zeros(2), torch.ones(2)
    >>> y, finite = normalize(torch.full((4, 2), float("nan")), mean, var, None, None, True, 0.1, 1e-5, None, None, 0)
    >>> bool(finite), mean
    (False, tensor([0., 0.]))

    The second value is None if nothing was to be updated; else it is true where the update took place (a tensor on
    torch's path, so that a device need not be waited for). ``batches`` is a count of updates that the kernel may keep:
    if it did, the second value is None, too.
    """
    name = activation or "none"
    kernel = kernels.kernel()
    plain = mask is None and groups == 1 and moments is None and reduce is None
    slope = negative_slope if name == "leaky_relu" else 0.0
    if plain:
        if call.compiled is not None and not _compiling():
            done: tuple[Tensor, bool | None] | None = call.compiled.normalize(
                x, running_mean, running_var, weight, bias, residual, batches, training, momentum, eps, name, slope
            )
            if done is not None:
                return done
    else:
        if type(x) not in _PLAIN:
            check_tensors(x, running_mean, running_var, weight, bias, residual, where)
        check_dimensions(x, where)
        if mask is not None:
            mask = _as_mask(mask, x, where)
        check_statistics(x, training, mask, groups, moments, reduce, where)
        if not training:  # then the batch's statistics are not used
            groups, moments, reduce, plain = 1, None, None, mask is None
    if batches is not None and not _compiling() and _tracing() is None:
        check_memory(batches, "num_batches_tracked", where)
    if not (type(momentum) in NUMBERS and type(eps) in NUMBERS and type(negative_slope) in NUMBERS):
        check_numbers(momentum, eps, negative_slope, where)
    if (
        kernel is None
        or (served := _serves(x, running_mean, running_var, weight, bias, residual, training)) is None
        or (running_mean is None) != (running_var is None)
        or not (training or running_mean is not None)
        or negative_slope < 0  # then the output's sign does not tell the input's
        or eps <= 0
        or name not in ACTIVATIONS
        or not (plain or _serves_mask(x, mask))
    ):
        # What is wrong ends here, in a sentence; what is right but not the kernel's goes to torch.
        if torch._C._get_tracing_state() is None:  # else sizes are tensors, and looking at them warns
            alone = training and reduce is None
            check(x, running_mean, running_var, weight, bias, training, eps, name, residual, where, alone)
        check_dtypes(x, running_mean, running_var, weight, bias, where)
        if training and moments is None and graph_op.serves(x, weight, bias, residual, mask, slope):
            y, moments = graph_op.train(x, weight, bias, residual, mask, groups, eps, name, slope)
            if running_mean is None or running_var is None:
                return y, None
            return y, update_running(running_mean, running_var, merged(moments), momentum)
        if plain:
            return fallback.batch_norm(
                x, running_mean, running_var, weight, bias, training, momentum, eps, name, residual, negative_slope
            )
        return _in_torch(
            x, running_mean, running_var, weight, bias, training, momentum, eps, name, residual, negative_slope,
            mask, groups, moments, reduce,
        )  # fmt: skip
    rows, like = served
    layout = None
    if x.is_neg():
        x = x.resolve_neg()
    if residual is not None and residual.is_neg():
        residual = residual.resolve_neg()
    if like is None or mask is not None:
        x, like, layout = dense(x, mask is not None)
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    if moments is None and groups == 1:
        marks = None if mask is None else _bytes(mask)
        # Small batches are all overhead, and this makes the same tuples in a fifth of the time.
        setting = _tuple(
            Setting, (kernel.run, like, layout, training, momentum, eps, slope, name, 1, 0, marks, None, None)
        )
        updates = training and running_mean is not None
        if batches is not None and not (
            updates
            and batches.dtype is _INT64
            and type(batches) in _PLAIN
            and batches.is_cpu
            and batches.numel() == 1
            and not batches.is_neg()
        ):
            batches = None
        results: list[Any] = []
        rest = _tuple(Rest, (running_mean, running_var, rows, batches, setting, results))
        y = differentiable.differentiable(x, weight, bias, residual, rest)
        finite = results[0] == 0
        return y, finite if updates and not (finite and batches is not None) else None
    # The kernel does not update from several groups, nor from moments that were given to it.
    setting = Setting(
        kernel.run, like, layout, True, momentum, eps, slope, name, groups, x.shape[0], _bytes(mask), moments, reduce
    )
    results = []
    y = differentiable.differentiable(x, weight, bias, residual, Rest(None, None, (), None, setting, results))
    found = results[1]
    if running_mean is None or running_var is None:
        return y, None
    if moments is None:
        assert found is not None
        moments = Moments(fallback.counts(x, mask, groups), found[:, 0], found[:, 1])
    return y, update_running(running_mean, running_var, merged(moments), momentum)


def _in_torch(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    residual: Tensor | None,
    negative_slope: float,
    mask: Tensor | None,
    groups: int,
    moments: Moments | None,
    reduce: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Normalise with a mask, groups or statistics of several processes, in torch's operators."""
    rest = (weight, bias, eps, activation, residual, negative_slope, mask)
    if not training:
        return fallback.composite(x, running_mean, running_var, *rest), None
    if reduce is None:
        y = fallback.composite(x, None, None, *rest, groups)
    else:
        assert moments is not None
        y = fallback.Staged.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, residual, moments, eps, activation, negative_slope, mask, reduce
        )
    if running_mean is None or running_var is None:
        return y, None
    if moments is None:
        moments = fallback.moments(x, mask, groups)
    return y, update_running(running_mean, running_var, merged(moments), momentum)


def _serves(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    updates: bool = False,
) -> tuple[list[int], tuple[int, int, int] | None] | None:
    """Whether the native kernel may run: valid, plain CPU tensors of supported dtypes, and no tracing.

    If so, the answer is where it finds mean, variance, weight and bias (0: there is none), or an empty list if they
    have to be converted for it, and how it reads ``x``, if that is contiguous.
    """
    if (
        _compiling()
        or _tracing() is not None  # before any size is read: a tracer's sizes are tensors
        or type(x) not in _PLAIN
        or (dtype := x.dtype) not in CODES
        or not x.is_cpu
        or _transforming()
        or _dispatching() != 0
        or forward_ad._current_level >= 0
    ):
        return None
    rows, direct = [], True
    try:
        shape = x.shape  # a nested tensor has none
        if len(shape) < 2:
            return None
        size = shape[1:2]
        for tensor in (running_mean, running_var, weight, bias):
            if tensor is None:
                rows.append(0)
                continue
            if (
                type(tensor) not in _PLAIN
                or tensor.shape != size
                or ((kind := tensor.dtype) is not _32 and kind is not dtype)
                or not tensor.is_cpu
            ):
                return None
            if not (address := tensor.data_ptr()) or not fits(tensor):
                return None
            if kind is not _32 or not tensor.is_contiguous() or tensor.is_neg():
                direct = False
            rows.append(address)
        if running_mean is not None and running_var is not None:
            if torch.is_grad_enabled() and (running_mean.requires_grad or running_var.requires_grad):
                return None
            if updates and overlap(running_mean, running_var):
                return None
        if residual is not None:
            if (
                type(residual) not in _PLAIN
                or residual.shape != shape
                or residual.dtype is not dtype
                or not residual.is_cpu
            ):
                return None
            if not residual.data_ptr() or not fits(residual):
                return None
        if not x.data_ptr() or not fits(x):  # zeros without memory, or nothing at all
            return None
    except RuntimeError:  # a tensor without memory, such as one of a function transform that has ended
        return None
    # A sample fills a vector, whatever its instruction set; and an empty or single-row batch is torch's business.
    numel, batch, channels = x.numel(), shape[0], shape[1]
    if numel < LANES * (batch or 1) or channels * 2 > numel:
        return None
    like = (batch, channels, numel // (batch * channels)) if x.is_contiguous() else None
    return rows if direct else [], like


def _serves_mask(x: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can skip what a mask leaves out: it needs long rows of positions, or of channels."""
    if mask is None:
        return True
    positions = x.numel() // (x.shape[0] * x.shape[1])
    return type(mask) in _PLAIN and mask.is_cpu and (positions >= LANES or x.shape[1] >= LANES)


def _as_mask(mask: Tensor, x: Tensor, where: str) -> Tensor:
    """Return `as_mask` of a mask whose memory is there."""
    if isinstance(mask, Tensor) and not _compiling() and _tracing() is None:
        check_layout(mask, "mask", where)
        check_memory(mask, "mask", where)
    return as_mask(mask, x, where)


def _bytes(mask: Tensor | None) -> Tensor | None:
    """Return the mask as the kernel reads it: a byte for each position."""
    return None if mask is None else mask.contiguous().view(torch.uint8)
