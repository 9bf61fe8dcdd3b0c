"""The kernel as a differentiable function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from batchnorm.errors import BatchNormError
from batchnorm.kernels import fallback, native
from batchnorm.kernels.native import ACTIVATIONS, AUX_BITS, AUX_NONE, AUX_RESIDUAL
from batchnorm.kernels.saved import Setting, end_of_rows, length_of_notes, unpacked
from batchnorm.kernels.storage import check_memory

CODES = {torch.float32: 0, torch.bfloat16: 1}

# On small batches overhead dominates: names that every call uses are module globals, found in one lookup.
_32 = torch.float32
_ROWS, _TRAIN, _BACKWARD_TRAIN = native.SAVED_ROWS, native.TRAIN, native.BACKWARD_TRAIN
_pack, _threads, _increment_version = native.pack_arguments, torch.get_num_threads, torch._C._increment_version
_transforming = torch._C._are_functorch_transforms_active
# Asking one of these for a new tensor takes half as long as torch.empty with a dtype and a device.
_FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")
_FLOAT64 = torch.empty(0, dtype=torch.float64, device="cpu")
_UINT8 = torch.empty(0, dtype=torch.uint8, device="cpu")
# Allocates outputs and gradients; call.py replaces it by a faster function (see call_tensors.h).
empty_like: Callable[[Tensor], Tensor] = torch.empty_like
KINKED = ("relu", "relu6", "leaky_relu")  # their slope is one of two numbers: a bit tells which


class Rest(NamedTuple):
    """The arguments of a call without gradients, as one argument, because each costs time in autograd."""

    running_mean: Tensor | None
    running_var: Tensor | None
    rows: Sequence[int]  # addresses of mean, variance, weight and bias; empty if some have to be converted
    batches: Tensor | None  # counts the updates of the running statistics
    setting: Setting
    results: list[Any]  # filled with the kernel's status (0: all moments are finite) and the moments, if asked for


def differentiable(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rest: Rest
) -> Tensor:
    """Return the output, and fill ``rest.results``."""
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        return _apply(x, weight, bias, residual, rest)
    return Native.forward(None, x, weight, bias, residual, rest)


def moments(x: Tensor, setting: Setting) -> Tensor:
    """Return mean and biased variance, shape (groups, 2, channels), in float64."""
    groups, channels = setting.groups, setting.like[1]
    found = _FLOAT64.new_empty(groups, 2, channels)
    scratch = _FLOAT32.new_empty(groups * native.SAVED_ROWS, channels)
    _call(setting, native.MOMENTS, AUX_NONE, x, saved=scratch.data_ptr(), moments=found.data_ptr())
    return found


def _call(
    setting: Setting,
    operation: int,
    aux: int,
    x: Tensor,
    auxiliary: int = 0,
    dy: int = 0,
    out: int = 0,
    out_residual: int = 0,
    weight: int = 0,
    bias: int = 0,
    running_mean: int = 0,
    running_var: int = 0,
    batches: int = 0,
    saved: int = 0,
    grad_weight: int = 0,
    grad_bias: int = 0,
    moments: int = 0,
    sums: int = 0,
    total: float = 0.0,
    bits: int = 0,
) -> int:
    """Call the kernel: the one place that knows the order of its arguments. All but ``x`` are addresses, or 0."""
    run, like, _, _, momentum, eps, slope, name, groups, samples, mask, _, _ = setting
    activation, cap = ACTIVATIONS[name]
    code: int = run(
        _pack(
            operation,
            CODES[x.dtype],
            activation,
            aux,
            _threads(),
            *like,
            groups,
            samples,
            0 if mask is None else mask.data_ptr(),
            x.data_ptr(),
            auxiliary,
            dy,
            bits,
            out,
            out_residual,
            weight,
            bias,
            running_mean,
            running_var,
            batches,
            saved,
            grad_weight,
            grad_bias,
            moments,
            sums,
            eps,
            momentum,
            slope,
            cap,
            total,
        )
    )
    if code < 0:
        refuse(x, code)
    return code


def refuse(x: Tensor, code: int) -> None:
    """Raise the error of a negative code: the kernel failed, and its outputs are invalid."""
    if code == -1:
        raise MemoryError(f"no memory for the statistics of a batch of shape {list(x.shape)}")
    raise BatchNormError(f"the kernel refused an input of shape {list(x.shape)} (code {code})")


class Native(torch.autograd.Function):
    """Forward and backward of the kernel. Double backward differentiates `fallback.composite`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rest: Rest
    ) -> Tensor:
        """Without a ``ctx`` there is no backward pass, and nothing is saved."""
        running_mean, running_var, rows, batches, setting, results = rest
        _, (_, channels, _), layout, training, _, _, _, name, groups, _, mask, given, _ = setting
        y = empty_like(x)
        mean32, var32 = running_mean, running_var
        if not rows:
            # The kernel gets addresses, so this list keeps the tensors alive until it returns.
            converted = [_float32(tensor) for tensor in (running_mean, running_var, weight, bias)]
            mean32, var32, _, _ = converted
            rows = [_address(tensor) for tensor in converted]
        moments = None
        if given is not None:
            operation = native.APPLY
            moments = torch.stack((given.mean, given.var), -2).to(_FLOAT64)
        elif training:
            operation = _TRAIN
            if groups > 1:
                moments = _FLOAT64.new_empty(groups, 2, channels)
        else:
            operation = native.EVAL
        # Without a residual, x tells the activation's slope. With one, a bit for each element does, or for silu, whose
        # slope is no bit, the residual.
        aux = AUX_NONE
        if residual is not None:
            aux = AUX_BITS if ctx is not None and name in KINKED else AUX_RESIDUAL
        notes = _UINT8.new_empty(length_of_notes(setting, aux))
        code = _call(
            setting,
            operation,
            aux,
            x,
            0 if residual is None else residual.data_ptr(),
            0,
            y.data_ptr(),
            0,
            rows[2],
            rows[3],
            rows[0],
            rows[1],
            0 if batches is None else batches.data_ptr(),
            notes.data_ptr(),
            0,
            0,
            0 if moments is None else moments.data_ptr(),
            0,
            0.0,
            notes.data_ptr() + end_of_rows(setting),
        )
        results += (code, moments)
        if training and code == 0 and running_mean is not None and running_var is not None:
            if mean32 is not running_mean or var32 is not running_var:
                running_mean.copy_(mean32)  # type: ignore[arg-type]
                running_var.copy_(var32)  # type: ignore[arg-type]
                _increment_version(() if batches is None else (batches,))
            elif batches is None:
                _increment_version((running_mean, running_var))
            else:
                _increment_version((running_mean, running_var, batches))
        if layout is not None:
            y = y.contiguous(memory_format=layout)
        if ctx is not None:
            again = residual if name == "silu" else None
            if mask is None and again is None:
                ctx.save_for_backward(x, weight, bias, notes)
            else:
                ctx.save_for_backward(x, weight, bias, notes, again, mask)
            ctx.rest = setting, x.stride(), AUX_NONE if name == "none" else aux
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of what `forward` was given."""
        return gradients(ctx, dy, ctx.saved_tensors)


# What `Native.apply` comes down to where no function transform is active, as `functional` has made sure: the method
# around it that looks for them takes as long as the kernel does on a small batch.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Native).apply


def gradients(ctx: Any, dy: Tensor, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients from the saved tensors, which are passed in because checkpointing unpacks them only once."""
    setting, strides, aux = ctx.rest
    check_memory(dy, "the output's gradient")
    x, weight, bias, notes, residual, mask = saved = unpacked(dy.dtype, length_of_notes(setting, aux), *tensors)
    if torch.is_grad_enabled() or _transformed(dy):
        return _differentiable_backward(ctx, dy, saved)
    if mask is not None:
        setting = setting._replace(mask=mask.contiguous())
    if dy.is_neg():
        dy = dy.resolve_neg()
    needs = ctx.needs_input_grad
    if x.stride() != strides:
        x = x.new_empty_strided(x.shape, strides).copy_(x)
    if dy.stride() != strides:
        dy = torch.empty_like(x).copy_(dy)
    dx = empty_like(x)
    # Always without gaps: a row that has some is not copied with them.
    dweight = torch.empty_like(weight, dtype=_32) if needs[1] else None
    dbias = torch.empty_like(bias, dtype=_32) if needs[2] else None
    dresidual = None
    if residual is not None and residual.stride() != strides:  # hooks on saved tensors may give back others
        residual = torch.empty_like(x).copy_(residual)
    if needs[3] and setting.activation != "none":
        dresidual = empty_like(x)
    if setting.reduce is None:
        _call(
            setting,
            _BACKWARD_TRAIN if setting.training else native.BACKWARD_EVAL,
            aux,
            x,
            _address(residual),
            dy.data_ptr(),
            dx.data_ptr(),
            0 if dresidual is None else dresidual.data_ptr(),
            0,
            0,
            0,
            0,
            0,
            notes.data_ptr(),
            0 if dweight is None else dweight.data_ptr(),
            0 if dbias is None else dbias.data_ptr(),
            0,
            0,
            0.0,
            notes.data_ptr() + end_of_rows(setting),
        )
    else:
        _staged_backward(setting, aux, x, residual, dy, dx, dresidual, notes, dweight, dbias)
    if setting.layout is not None:
        dx = dx.contiguous(memory_format=setting.layout)
    if needs[3] and dresidual is None:  # there is nothing between the sum and the output but the mask
        dresidual = dy if mask is None else torch.where(_positions(mask, x), dy, 0)
    return (
        dx if needs[0] else None,
        dweight if dweight is None or weight.dtype is _32 else dweight.to(weight.dtype),
        dbias if dbias is None or bias.dtype is _32 else dbias.to(bias.dtype),
        dresidual,
        None,
    )


def _staged_backward(
    setting: Setting,
    aux: int,
    x: Tensor,
    residual: Tensor | None,
    dy: Tensor,
    dx: Tensor,
    dresidual: Tensor | None,
    notes: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """The two halves of a backward pass, with an exchange of the sums between them."""
    assert setting.moments is not None
    assert setting.reduce is not None
    sums = _FLOAT64.new_empty(2, setting.like[1])
    both = {
        "auxiliary": _address(residual), "dy": dy.data_ptr(), "saved": notes.data_ptr(),
        "bits": notes.data_ptr() + end_of_rows(setting),
    }  # fmt: skip
    parameters = {"grad_weight": _address(dweight), "grad_bias": _address(dbias)}
    _call(setting, native.GRAD_SUMS, aux, x, sums=sums.data_ptr(), **both, **parameters)
    everyones = _reduced(sums, setting.reduce)
    total = float(setting.moments.count)
    outputs = {"out": dx.data_ptr(), "out_residual": _address(dresidual)}
    _call(setting, native.GRAD_APPLY, aux, x, sums=everyones.data_ptr(), total=total, **both, **outputs)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _reduced(sums: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sums over all processes, checked, because the kernel reads them by address."""
    everyones = reduce(sums)
    if everyones.shape != sums.shape:
        raise BatchNormError(
            f"reduce was given a tensor of shape {list(sums.shape)} and returned one of shape {list(everyones.shape)}",
            do="return the sum over all processes, such as torch.distributed.all_reduce makes it",
        )
    check_memory(everyones, "what reduce returned")
    return everyones.resolve_neg().to(_FLOAT64).contiguous()


def _differentiable_backward(ctx: Any, dy: Tensor, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return differentiable gradients."""
    for parameter, name in zip(saved[1:3], ("weight", "bias"), strict=True):
        check_memory(parameter, name, do="keep it until the backward pass is done")
    setting, strides, aux = ctx.rest
    passes = _passes(setting, strides, saved[0].detach(), saved[3]) if aux == AUX_BITS else None
    return (*second_order(ctx.needs_input_grad, setting, dy, saved, passes), None)


def second_order(
    needs: Sequence[bool], setting: Setting, dy: Tensor, saved: tuple[Any, ...], passes: Tensor | None
) -> tuple[Any, ...]:
    """Return differentiable gradients, from the definition in elementary operations.

    ``passes``: where the slope of a piecewise linear activation is 1, if bits of the forward pass say so.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a tensor given twice, as input and as residual, has two gradients and not twice their sum.
        views: list[Any] = [None if t is None else t.view_as(t) for t in saved]
        x, weight, bias, notes, residual, marks = views
        mean = var = None
        if not setting.training:
            rows = notes[: end_of_rows(setting)].view(_32).view(_ROWS, -1)
            mean = rows[0]  # all of it: running statistics are float32
            var = rows[4].double().pow(-2).sub(setting.eps).to(_32)
        if passes is not None:  # the slope of a piecewise linear activation is a constant
            inner = "none"
            low = dy * setting.slope if setting.slope else 0.0  # not 0 * dy, which may be infinite
            dz = torch.where(passes, dy, low)
        else:
            inner, dz = setting.activation, dy
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
    return dx, dweight, dbias, dresidual


def _transformed(dy: Tensor) -> bool:
    """Whether a gradient is more than its numbers: batched by vmap, or carrying a tangent."""
    if _transforming() or forward_ad._current_level >= 0:
        return True
    try:
        return dy.data_ptr() == 0  # zeros without memory
    except RuntimeError:  # it has no memory of its own: is_grads_batched, or a transform that has ended
        return True


def _positions(mask: Tensor, x: Tensor) -> Tensor:
    return mask.bool().view(x.shape[0], 1, *x.shape[2:])


def _passes(setting: Setting, strides: tuple[int, ...], x: Tensor, notes: Tensor) -> Tensor:
    """Where the activation's slope is 1 according to the saved bits."""
    if x.stride() != strides:
        x = x.new_empty_strided(x.shape, strides).copy_(x)
    ones, slope, unused = torch.ones_like(x), torch.empty_like(x), torch.empty_like(x)
    _call(
        setting, native.BACKWARD_EVAL, AUX_BITS, x, dy=ones.data_ptr(), out=unused.data_ptr(),
        out_residual=slope.data_ptr(), saved=notes.data_ptr(), bits=notes.data_ptr() + end_of_rows(setting),
    )  # fmt: skip
    return slope == 1


def _float32(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as the kernel reads it; bfloat16 parameters and odd strides cost a small copy."""
    if tensor is None or (tensor.dtype is _32 and tensor.is_contiguous() and not tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_neg().to(torch.float32).contiguous()
