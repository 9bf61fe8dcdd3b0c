"""The kernel as custom operators for `torch.compile`: ``torch.ops.batchnorm.train`` and ``train_backward``.

- torch registers no derivative for an operator that writes to its arguments. These write to none: the moments of the
  batch are an output, and the running statistics follow them in torch's operators, in the same graph.
- What the backward pass reads is an output, too, so that it does not repeat the forward pass.
- They take any layout, and return results in it. Inductor gives convolutions channels_last whatever the model says; an
  operator that insisted on the layout it was traced with would cost a copy on either side.
- There is no operator for evaluation. Alone, the kernel is faster than the loop that Inductor writes; between
  convolutions it is not, and it would prevent fusion with neighbors and folding into convolutions.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.kernels import differentiable, fallback, native
from batchnorm.kernels.differentiable import CODES, KINKED
from batchnorm.kernels.layout import LANES, by_rows, dense
from batchnorm.kernels.native import AUX_BITS, AUX_NONE, AUX_RESIDUAL
from batchnorm.kernels.saved import Setting, end_of_rows, length_of_notes
from batchnorm.masks import check_counts
from batchnorm.moments import Moments

# Compiled graphs are cached on disk with the output sizes of the operators, so each kernel ABI has its own overload.
OVERLOAD = f"abi{native.ABI}"
_library = torch.library.Library("batchnorm", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = [getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "flexible_layout") if hasattr(torch.Tag, name)]
_PLAIN = (Tensor, torch.nn.Parameter)
SWITCH = "BATCHNORM_COMPILE"
CHOSEN = os.environ.get(SWITCH, "torch") == "kernel"  # not by default: a MobileNetV2 is slower with the operators
ENOUGH = 8192  # values; below that, Inductor's own code takes less time than the calls of the operators


def serves(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, slope: float
) -> bool:
    """Whether these operators may go into the graph being compiled; the arguments have been checked.

    >>> serves(torch.zeros(8, 64), None, None, None, None, 0.0)  # nothing is being compiled
    False

    Exported graphs hold torch's, which run where this package is not installed. So do function transforms and
    forward-mode derivatives, which know torch's only, and what the kernel does not read.
    """
    if (
        not CHOSEN
        or kernels.kernel() is None
        or not torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or _transformed()
        or forward_ad._current_level >= 0
        or x.device.type != "cpu"
        or x.dtype not in CODES
        or (residual is not None and residual.dtype is not x.dtype)
        or slope < 0  # then the output's sign does not tell the input's
    ):
        return False
    for tensor in (x, weight, bias, residual, mask):
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    channels, positions = x.shape[1], x.shape[2:].numel()
    if channels * positions < LANES or x.shape[0] * positions < 2:
        return False
    # Asked of small samples only, because then the graph holds for a range of batches, and not for all.
    if channels * positions < 256 and x.numel() < ENOUGH:
        return False
    return mask is None or positions >= LANES or channels >= LANES


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


# Dynamo takes the answer for a constant. It would put the question into the graph, which caches then refuse. (What sets
# this, `torch.compiler.assume_constant_result`, imports dynamo: seconds.)
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Moments]:
    """Return the output, and the moments of the batch or, of several groups or with a mask, of each group."""
    operator = getattr(torch.ops.batchnorm.train, OVERLOAD)
    y, _, found = operator(x, weight, bias, residual, mask, groups, eps, activation, slope)
    if groups > 1 or mask is not None:
        return y, Moments(fallback.counts(x, mask, groups), found[:, 0], found[:, 1])
    count = torch.full((), x.shape[0] * x.shape[2:].numel(), dtype=torch.float64)
    return y, Moments(count, found[0, 0], found[0, 1])


# ---- what both passes share -----------------------------------------------------------------------------------------


def _arranged(
    x: Tensor, mask: Tensor | None, groups: int, eps: float, name: str, slope: float
) -> tuple[Tensor, Setting]:
    """Return the tensor in a layout that the kernel reads, and the settings of the call."""
    x, like, layout = dense(x, mask is not None)
    marks = None if mask is None else mask.contiguous().view(torch.uint8)
    return x, Setting(None, like, layout, True, 0.0, eps, slope, name, groups, x.shape[0], marks)


def _run() -> Any:
    kernel = kernels.kernel()
    if kernel is None:
        raise BatchNormError(
            f"the graph was compiled for the native kernel, but this process uses {kernels.describe()}",
            do="compile it in a process with the same settings",
        )
    return kernel.run


def _aux(name: str, added: bool) -> int:
    if not added or name == "none":
        return AUX_NONE
    return AUX_BITS if name in KINKED else AUX_RESIDUAL


def _length(x: Tensor, setting: Setting, aux: int) -> int:
    """How many bytes hold what the backward pass reads, in any layout; the last of them is 1 if rows are of channels.

    Inductor may change the layout of ``x``, even between the passes, but not the size of an output.
    """
    if aux != AUX_BITS:
        return end_of_rows(setting)
    batch, channels, positions = x.shape[0], x.shape[1], x.shape[2:].numel()
    row = (channels + 7) // 8
    if positions > 1:
        row = torch.sym_max(channels * ((positions + 7) // 8), positions * row)  # type: ignore[no-untyped-call]
    return end_of_rows(setting) + batch * row + 5


# ---- forward --------------------------------------------------------------------------------------------------------


def _train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if mask is not None:
        check_counts(mask, groups, "batch_norm")
    x, setting = _arranged(x, mask, groups, eps, activation, slope)
    setting = setting._replace(run=_run())
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    aux = _aux(activation, residual is not None)
    y, notes, moments = _results(x, setting, aux)
    if aux == AUX_BITS:
        notes[-1] = setting.like[2] == 1
    rows = [differentiable._float32(row) for row in (weight, bias)]  # held until the kernel is done
    differentiable._call(
        setting,
        native.TRAIN,
        AUX_RESIDUAL if residual is not None and aux == AUX_NONE else aux,
        x,
        differentiable._address(residual),
        out=y.data_ptr(),
        weight=differentiable._address(rows[0]),
        bias=differentiable._address(rows[1]),
        saved=notes.data_ptr(),
        moments=moments.data_ptr(),
        bits=notes.data_ptr() + end_of_rows(setting),
    )
    return y if setting.layout is None else y.contiguous(memory_format=setting.layout), notes, moments


def _results(x: Tensor, setting: Setting, aux: int) -> tuple[Tensor, Tensor, Tensor]:
    new = x.new_zeros if aux == AUX_BITS else x.new_empty  # the same bytes in each run, those between the rows too
    notes = new(_length(x, setting, aux), dtype=torch.uint8)
    return differentiable.empty_like(x), notes, x.new_empty((setting.groups, 2, x.shape[1]), dtype=torch.float64)


def _train_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x, setting = _arranged(x, mask, groups, eps, activation, slope)
    y, notes, moments = _results(x, setting, _aux(activation, residual is not None))
    return y if setting.layout is None else y.contiguous(memory_format=setting.layout), notes, moments


# ---- backward -------------------------------------------------------------------------------------------------------


class _Kept:
    """The part of autograd's context that `differentiable.gradients` uses."""

    def __init__(self, *rest: Any, needs: tuple[bool, ...]) -> None:
        self.rest, self.needs_input_grad = rest, needs


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    notes: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    added: bool,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, setting = _arranged(x, mask, groups, eps, activation, slope)
    setting, aux, read = setting._replace(run=_run()), _aux(activation, added), x
    if aux == AUX_BITS and (rows := bool(notes[-1])) != (setting.like[2] == 1):  # x had another layout then
        batch, channels, positions = x.shape[0], x.shape[1], x.shape[2:].numel()
        read = by_rows(x) if rows else x.contiguous()
        setting = setting._replace(like=(batch * positions, channels, 1) if rows else (batch, channels, positions))
    needs = (True, weight is not None, bias is not None, added and activation != "none")
    saved = read, weight, bias, notes[: length_of_notes(setting, aux)], residual, setting.mask
    with torch.no_grad():
        found = differentiable.gradients(_Kept(setting, read.stride(), aux, needs=needs), dy, saved)
    dx, dweight, dbias, dresidual = (x.new_empty(0) if part is None else part for part in found[:4])
    if read is not x:
        dx = torch.empty_like(x, memory_format=setting.layout or torch.preserve_format).copy_(dx)
        dresidual = torch.empty_like(x).copy_(dresidual)
    return dx, dweight, dbias, dresidual


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    notes: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    added: bool,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, setting = _arranged(x, mask, groups, eps, activation, slope)
    dx = torch.empty_like(x, memory_format=setting.layout or torch.preserve_format)
    dweight, dbias = (x.new_empty(0) if row is None else row.new_empty(row.shape) for row in (weight, bias))
    return dx, dweight, dbias, torch.empty_like(x) if added and activation != "none" else x.new_empty(0)


# ---- autograd -------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, mask, groups, eps, activation, slope = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, output[1], residual if activation == "silu" else None, mask)
    ctx.rest = residual is not None, groups, eps, activation, slope


def _differentiate(ctx: Any, dy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    """Return the gradients: from the kernel or, if they must be differentiable, in torch's operators."""
    none = (None,) * 9
    if dy is None:
        return none
    needs, saved, (added, groups, eps, activation, slope) = ctx.needs_input_grad, ctx.saved_tensors, ctx.rest
    x, mask = saved[0], saved[5]
    operator = getattr(torch.ops.batchnorm.train_backward, OVERLOAD)
    if torch.is_grad_enabled():
        passes = None
        if _aux(activation, added) == AUX_BITS:
            with torch.no_grad():
                passes = operator(torch.ones_like(x), *saved, *ctx.rest)[3] == 1
        marks = None if mask is None else mask.view(torch.uint8)
        setting = Setting(None, (0, 0, 0), None, True, 0.0, eps, slope, activation, groups, x.shape[0], marks)
        return (*differentiable.second_order(needs, setting, dy, (*saved[:5], marks), passes), *none[4:])
    dx, dweight, dbias, dresidual = operator(dy, *saved, *ctx.rest)
    if added and activation == "none":
        dresidual = dy if mask is None else torch.where(mask.unsqueeze(1), dy, 0)
    gradients = (dx, dweight, dbias, dresidual)
    return (*(part if needed else None for part, needed in zip(gradients, needs, strict=False)), *none[4:])


_BEFORE, _BETWEEN = "Tensor x, Tensor? weight, Tensor? bias", "Tensor? residual, Tensor? mask"
_AFTER = "SymInt groups, float eps, str activation, float slope"
for _name, _inputs, _outputs, _real, _fake in (
    ("train", f"{_BEFORE}, {_BETWEEN}, {_AFTER}", 3, _train, _train_fake),
    (
        "train_backward",
        f"Tensor dy, {_BEFORE}, Tensor notes, {_BETWEEN}, bool added, {_AFTER}",
        4,
        _backward,
        _backward_fake,
    ),
):
    _full = f"{_name}.{OVERLOAD}"
    _library.define(  # type: ignore[no-untyped-call]
        f"{_full}({_inputs}) -> ({', '.join(['Tensor'] * _outputs)})",
        tags=_TAGS,
    )
    _library.impl(_full, _real, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"batchnorm::{_full}", _fake, lib=_library)
torch.library.register_autograd(f"batchnorm::train.{OVERLOAD}", _differentiate, setup_context=_keep, lib=_library)
