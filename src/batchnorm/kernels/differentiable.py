"""The kernel as a differentiable function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from batchnorm.errors import BatchNormError
from batchnorm.kernels import fallback, native
from batchnorm.kernels.native import ACTIVATIONS, AUX_NONE, AUX_OUTPUT, AUX_RESIDUAL
from batchnorm.moments import Moments

CODES = {torch.float32: 0, torch.bfloat16: 1}
# Asking one of these for a new tensor takes half as long as torch.empty with a dtype and a device.
_FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")
_FLOAT64 = torch.empty(0, dtype=torch.float64, device="cpu")


class Setting(NamedTuple):
    """What a call is besides its tensors."""

    run: Any
    like: tuple[int, int, int]  # x as the kernel reads it: batch, channels, positions
    layout: torch.memory_format | None  # what the results are converted to
    training: bool
    momentum: float
    eps: float
    slope: float
    activation: str
    groups: int = 1
    samples: int = 0
    mask: Tensor | None = None  # uint8, one number per sample and position
    moments: Moments | None = None  # of the batch, if they are known
    reduce: Callable[[Tensor], Tensor] | None = None  # adds the backward sums of other processes


def differentiable(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    setting: Setting,
) -> tuple[Tensor, int, Tensor | None]:
    """Return the output, the kernel's status (0: all moments are finite), and the moments if they were asked for."""
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        told: list[Any] = []
        y: Tensor = _Native.apply(x, weight, bias, residual, running_mean, running_var, setting, told)  # type: ignore[no-untyped-call]
        return y, told[0], told[1]
    y, _, status, moments = _forward(x, weight, bias, residual, running_mean, running_var, setting)
    return y, status, moments


def moments(x: Tensor, setting: Setting) -> Tensor:
    """Return mean and biased variance, shape (groups, 2, channels), in float64."""
    groups, channels = setting.groups, setting.like[1]
    found = _FLOAT64.new_empty(groups, 2, channels)
    scratch = _FLOAT32.new_empty(groups * native.SAVED_ROWS, channels)
    _call(setting, native.MOMENTS, AUX_NONE, x, None, None, None, None, scratch, moments=found)
    return found


def _call(
    setting: Setting,
    operation: int,
    aux: int,
    x: Tensor,
    auxiliary: Tensor | None,
    dy: Tensor | None,
    out: Tensor | None,
    out_residual: Tensor | None,
    saved: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    grad_weight: Tensor | None = None,
    grad_bias: Tensor | None = None,
    moments: Tensor | None = None,
    sums: Tensor | None = None,
    total: float = 0.0,
) -> int:
    """Call the kernel: the one place that knows the order of its arguments."""
    run, like, _, _, momentum, eps, slope, name, groups, samples, mask, _, _ = setting
    activation, cap = ACTIVATIONS[name]
    code: int = run(
        native.pack_arguments(
            operation,
            CODES[x.dtype],
            activation,
            aux,
            torch.get_num_threads(),
            *like,
            groups,
            samples,
            0 if mask is None else mask.data_ptr(),
            x.data_ptr(),
            0 if auxiliary is None else auxiliary.data_ptr(),
            0 if dy is None else dy.data_ptr(),
            0 if out is None else out.data_ptr(),
            0 if out_residual is None else out_residual.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if running_mean is None else running_mean.data_ptr(),
            0 if running_var is None else running_var.data_ptr(),
            saved.data_ptr(),
            0 if grad_weight is None else grad_weight.data_ptr(),
            0 if grad_bias is None else grad_bias.data_ptr(),
            0 if moments is None else moments.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            eps,
            momentum,
            slope,
            cap,
            total,
        )
    )
    if code < 0:  # it could not do its work, and its outputs are not to be looked at
        if code == -1:
            raise MemoryError(f"no memory for the statistics of a batch of shape {list(x.shape)}")
        raise BatchNormError(f"the kernel refused an input of shape {list(x.shape)} (code {code})")
    return code


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    setting: Setting,
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    _, like, layout, training, _, _, _, _, groups, _, _, given, _ = setting
    channels = like[1]
    y = torch.empty_like(x)
    saved = _FLOAT32.new_empty(groups * native.SAVED_ROWS, channels)
    mean32 = None if running_mean is None else _float32(running_mean)
    var32 = None if running_var is None else _float32(running_var)
    moments = None
    if given is not None:
        operation = native.APPLY
        moments = torch.stack((given.mean, given.var), -2).to(_FLOAT64)
    elif training:
        operation = native.TRAIN
        if groups > 1:
            moments = _FLOAT64.new_empty(groups, 2, channels)
    else:
        operation = native.EVAL
    code = _call(
        setting,
        operation,
        AUX_NONE if residual is None else AUX_RESIDUAL,
        x,
        residual,
        None,
        y,
        None,
        saved,
        None if weight is None else _float32(weight),
        None if bias is None else _float32(bias),
        mean32,
        var32,
        None,
        None,
        moments,
    )
    if training and code == 0:
        for buffer, copy in ((running_mean, mean32), (running_var, var32)):
            if buffer is not None and copy is not None:
                if copy is not buffer:
                    buffer.copy_(copy)
                else:
                    increment_version(buffer)
    if layout is not None:
        y = y.contiguous(memory_format=layout)
    return y, saved, code, moments


class _Native(torch.autograd.Function):
    """The kernel's two directions. A second derivative is taken of `fallback.composite`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        setting: Setting,
        told: list[Any],
    ) -> Tensor:
        y, saved, code, moments = _forward(x, weight, bias, residual, running_mean, running_var, setting)
        told += (code, moments)
        # With a residual, the activation's slope is told by the output (or, for silu, by the residual); without
        # one, by x, which is needed anyway.
        name = setting.activation
        if residual is None or name == "none":
            ctx.aux, auxiliary = AUX_NONE, None
        elif name == "silu":
            ctx.aux, auxiliary = AUX_RESIDUAL, residual
        else:
            ctx.aux, auxiliary = AUX_OUTPUT, y
        ctx.setting, ctx.strides = setting, x.stride()
        ctx.save_for_backward(x, weight, bias, saved, auxiliary, setting.mask)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() or _transformed(dy):
            return _differentiable_backward(ctx, dy)
        x, weight, bias, saved, auxiliary, mask = ctx.saved_tensors
        setting: Setting = ctx.setting if mask is None else ctx.setting._replace(mask=mask)
        needs = ctx.needs_input_grad
        if x.stride() != ctx.strides:  # hooks on saved tensors may give back other strides
            x = x.new_empty_strided(x.shape, ctx.strides).copy_(x)
        if auxiliary is not None and auxiliary.stride() != ctx.strides:
            auxiliary = torch.empty_like(x).copy_(auxiliary)
        if dy.stride() != ctx.strides:
            dy = torch.empty_like(x).copy_(dy)
        dx = torch.empty_like(x)
        dweight = _FLOAT32.new_empty(setting.like[1]) if weight is not None and needs[1] else None
        dbias = _FLOAT32.new_empty(setting.like[1]) if bias is not None and needs[2] else None
        dresidual = torch.empty_like(x) if needs[3] and setting.activation != "none" else None
        if setting.reduce is None:
            _call(
                setting,
                native.BACKWARD_TRAIN if setting.training else native.BACKWARD_EVAL,
                ctx.aux,
                x,
                auxiliary,
                dy,
                dx,
                dresidual,
                saved,
                grad_weight=dweight,
                grad_bias=dbias,
            )
        else:
            assert setting.moments is not None
            sums = _FLOAT64.new_empty(2, setting.like[1])
            _call(
                setting,
                native.GRAD_SUMS,
                ctx.aux,
                x,
                auxiliary,
                dy,
                None,
                dresidual,
                saved,
                grad_weight=dweight,
                grad_bias=dbias,
                sums=sums,
            )
            _call(
                setting,
                native.GRAD_APPLY,
                ctx.aux,
                x,
                auxiliary,
                dy,
                dx,
                dresidual,
                saved,
                sums=_reduced(sums, setting.reduce),
                total=float(setting.moments.count),
            )
        if setting.layout is not None:
            dx = dx.contiguous(memory_format=setting.layout)
        if needs[3] and dresidual is None:  # there is nothing between the sum and the output but the mask
            dresidual = dy if mask is None else torch.where(_positions(mask, x), dy, 0)
        return (
            dx if needs[0] else None,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            dresidual,
            None,
            None,
            None,
            None,
        )


def _reduced(sums: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Everyone's sums; the kernel reads them by their address, so they had better be what it expects."""
    everyones = reduce(sums)
    if everyones.shape != sums.shape:
        raise BatchNormError(
            f"reduce was given a tensor of shape {list(sums.shape)} and returned one of shape {list(everyones.shape)}",
            do="return the sum over all processes, such as torch.distributed.all_reduce makes it",
        )
    return everyones.to(_FLOAT64).contiguous()


def _differentiable_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return gradients that have gradients: differentiate the definition, written out in elementary operations."""
    again = torch.is_grad_enabled()
    needs = ctx.needs_input_grad
    setting: Setting = ctx.setting
    with torch.enable_grad():
        # Views, so that a tensor given twice, as input and as residual, has two gradients and not twice their sum.
        views: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
        x, weight, bias, saved, auxiliary, marks = views
        mean = var = None
        if not setting.training:
            mean = saved[0] + saved[1]
            var = saved[4].double().pow(-2).sub(setting.eps).to(saved.dtype)
        if ctx.aux == AUX_OUTPUT:
            # The slope of a piecewise linear activation is a constant; the output tells which piece.
            inner, residual = "none", None
            dz = dy * _slope(auxiliary, setting.activation, setting.slope)
        else:
            inner, residual, dz = setting.activation, auxiliary, dy
        mask = None if marks is None else _positions(marks, x).squeeze(1)
        inputs = [t for t, wanted in ((x, needs[0]), (weight, needs[1]), (bias, needs[2])) if wanted]
        if residual is not None and needs[3]:
            inputs.append(residual)
        grads: list[Any] = []
        if inputs:
            total = None if setting.reduce is None or setting.moments is None else setting.moments.count
            y = fallback.composite(
                x, mean, var, weight, bias, setting.eps, inner, residual, setting.slope,
                mask, setting.groups, setting.reduce, total,
            )  # fmt: skip
            grads = list(torch.autograd.grad(y, inputs, dz, create_graph=again, allow_unused=True))
        if mask is not None:
            dz = torch.where(mask.unsqueeze(1), dz, 0)
    dx = grads.pop(0) if needs[0] else None
    dweight = grads.pop(0) if needs[1] else None
    dbias = grads.pop(0) if needs[2] else None
    dresidual = None
    if needs[3]:
        dresidual = grads.pop(0) if residual is not None else dz
    return dx, dweight, dbias, dresidual, None, None, None, None


def _transformed(dy: Tensor) -> bool:
    """Whether a gradient is more than its numbers: batched by vmap, or carrying a tangent."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._functorch.is_legacy_batchedtensor(dy)  # is_grads_batched
    )


def _positions(mask: Tensor, x: Tensor) -> Tensor:
    return mask.bool().view(x.shape[0], 1, *x.shape[2:])


def _slope(y: Tensor, activation: str, negative_slope: float) -> Tensor:
    if activation == "relu6":
        return ((y > 0) & (y < 6)).to(y.dtype)
    low = negative_slope if activation == "leaky_relu" else 0.0
    return torch.where(y > 0, 1.0, low).to(y.dtype)


def _float32(tensor: Tensor) -> Tensor:
    """Return the tensor as the kernel reads it; bfloat16 parameters and odd strides cost a small copy."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(torch.float32).contiguous()
