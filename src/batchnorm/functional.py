"""``batch_norm`` as a function: autograd over a kernel, and the one place that chooses native or torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from batchnorm import kernels
from batchnorm.checks import NONFINITE, check, check_dtypes, report_nonfinite
from batchnorm.errors import BatchNormError
from batchnorm.kernels import fallback, native
from batchnorm.kernels.native import ACTIVATIONS, AUX_NONE, AUX_OUTPUT, AUX_RESIDUAL

__all__ = ["batch_norm"]

_CODES = {torch.float32: 0, torch.bfloat16: 1}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_PLAIN = (Tensor, torch.nn.Parameter)
_LANES = 16  # the widest vector; a tensor smaller than that is not worth a kernel


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
    """
    if nonfinite not in NONFINITE:
        raise BatchNormError(f"nonfinite is {nonfinite!r}", where="batch_norm", do="use 'reject' or 'raise'")
    y, finite = normalize(
        x, running_mean, running_var, weight, bias, training, momentum, eps, activation, residual, negative_slope
    )
    if finite is not None and not torch.compiler.is_compiling():
        report_nonfinite(finite, nonfinite, "batch_norm")
    return y


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
) -> tuple[Tensor, Tensor | bool | None]:
    """Do what `batch_norm` does, and return the output together with what became of the running statistics.

    >>> mean, var = torch.zeros(2), torch.ones(2)
    >>> y, finite = normalize(torch.full((4, 2), float("nan")), mean, var, None, None, True, 0.1, 1e-5, None, None, 0)
    >>> bool(finite), mean
    (False, tensor([0., 0.]))

    The second value is None if nothing was to be updated; else it is true where the update took place (a tensor on
    torch's path, so that a device need not be waited for).
    """
    name = activation or "none"
    kernel = kernels.kernel()
    if (
        kernel is None
        or not _serves(x, running_mean, running_var, weight, bias, residual)
        or (running_mean is None) != (running_var is None)
        or not (training or running_mean is not None)
        or negative_slope < 0  # then the output's sign does not tell the input's
        or eps <= 0
        or name not in ACTIVATIONS
    ):
        # What is wrong ends here, in a sentence; what is right but not the kernel's goes to torch.
        if torch._C._get_tracing_state() is None:  # else sizes are tensors, and looking at them warns
            check(x, running_mean, running_var, weight, bias, training, eps, name, residual, where)
        check_dtypes(x, running_mean, running_var, weight, bias, where)
        return fallback.batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, eps, name, residual, negative_slope
        )
    x, like, layout = _dense(x)
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    slope = negative_slope if name == "leaky_relu" else 0.0
    setting = (kernel.run, like, layout, training, momentum, eps, slope, name)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        status: list[int] = []
        y = _Native.apply(x, weight, bias, residual, running_mean, running_var, setting, status)  # type: ignore[no-untyped-call]
        code = status[0]
    else:
        y, _, code = _forward(x, weight, bias, residual, running_mean, running_var, setting)
    if not training or running_mean is None:
        return y, None
    return y, code == 0


def _serves(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> bool:
    """Whether the native kernel may take these: sound, plain CPU tensors of dtypes it knows, and nobody tracing."""
    dtype = x.dtype
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # before any size is read: a tracer's sizes are tensors
        or type(x) not in _PLAIN
        or not x.is_cpu
        or dtype not in _CODES
        or x.dim() < 2
    ):
        return False
    shape, numel = x.shape, x.numel()
    channels = shape[1]
    size = (channels,)
    for tensor in (running_mean, running_var, weight, bias):
        if tensor is not None and (
            tensor.shape != size
            or not (tensor.dtype is torch.float32 or tensor.dtype is dtype)
            or type(tensor) not in _PLAIN
            or not tensor.is_cpu
        ):
            return False
    if residual is not None and (
        residual.shape != shape or residual.dtype is not dtype or type(residual) not in _PLAIN or not residual.is_cpu
    ):
        return False
    return (
        numel >= _LANES * max(shape[0], 1)  # a sample fills a vector, whatever its instruction set
        and channels * 2 <= numel  # an empty or single-row batch is torch's business
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
    )


def _dense(x: Tensor) -> tuple[Tensor, tuple[int, int, int], torch.memory_format | None]:
    """Return the tensor in a layout the kernel reads, that layout as (batch, channels, positions), and the memory
    format to give the results if the kernel does not read the one of ``x``.
    """
    shape = x.shape
    batch, channels = shape[0], shape[1]
    if x.is_contiguous():
        return x, (batch, channels, x.numel() // (batch * channels)), None
    dims = x.dim()
    if dims > 2 and channels >= _LANES and x.movedim(1, -1).is_contiguous():
        return x, (x.numel() // channels, channels, 1), None
    layout = _CHANNELS_LAST.get(dims) if x.stride(1) == 1 and x.stride(-1) >= channels else None
    if layout is not None and channels >= _LANES:
        return x.contiguous(memory_format=layout), (x.numel() // channels, channels, 1), None
    return x.contiguous(), (batch, channels, x.numel() // (batch * channels)), layout


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    setting: tuple[Any, ...],
) -> tuple[Tensor, Tensor, int]:
    run, like, layout, training, momentum, eps, slope, name = setting
    activation, cap = ACTIVATIONS[name]
    y = torch.empty_like(x)
    saved = torch.empty((native.SAVED_ROWS, like[1]), dtype=torch.float32, device="cpu")
    weight32, bias32 = _float32(weight), _float32(bias)
    mean32, var32 = _float32(running_mean), _float32(running_var)
    code = run(
        native.pack_arguments(
            native.TRAIN if training else native.EVAL,
            _CODES[x.dtype],
            activation,
            AUX_NONE if residual is None else AUX_RESIDUAL,
            torch.get_num_threads(),
            *like,
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0,
            y.data_ptr(),
            0,
            0 if weight32 is None else weight32.data_ptr(),
            0 if bias32 is None else bias32.data_ptr(),
            0 if mean32 is None else mean32.data_ptr(),
            0 if var32 is None else var32.data_ptr(),
            saved.data_ptr(),
            0,
            0,
            eps,
            momentum,
            slope,
            cap,
        )
    )
    _done(code, x)
    if training and code == 0:
        for buffer, copy in ((running_mean, mean32), (running_var, var32)):
            if buffer is not None and copy is not None:
                if copy is not buffer:
                    buffer.copy_(copy)
                else:
                    increment_version(buffer)
    if layout is not None:
        y = y.contiguous(memory_format=layout)
    return y, saved, code


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
        setting: tuple[Any, ...],
        status: list[int],
    ) -> Tensor:
        y, saved, code = _forward(x, weight, bias, residual, running_mean, running_var, setting)
        status.append(code)
        # With a residual, the activation's slope is told by the output (or, for silu, by the residual); without
        # one, by x, which is needed anyway.
        name = setting[-1]
        if residual is None or name == "none":
            ctx.aux, auxiliary = AUX_NONE, None
        elif name == "silu":
            ctx.aux, auxiliary = AUX_RESIDUAL, residual
        else:
            ctx.aux, auxiliary = AUX_OUTPUT, y
        ctx.setting, ctx.strides = setting, x.stride()
        ctx.save_for_backward(x, weight, bias, saved, auxiliary)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() or _transformed(dy):
            return _differentiable_backward(ctx, dy)
        x, weight, bias, saved, auxiliary = ctx.saved_tensors
        run, like, layout, training, _, eps, slope, name = ctx.setting
        activation, cap = ACTIVATIONS[name]
        needs = ctx.needs_input_grad
        if x.stride() != ctx.strides:  # hooks on saved tensors may give back other strides
            x = x.new_empty_strided(x.shape, ctx.strides).copy_(x)
        if auxiliary is not None and auxiliary.stride() != ctx.strides:
            auxiliary = torch.empty_like(x).copy_(auxiliary)
        if dy.stride() != ctx.strides:
            dy = torch.empty_like(x).copy_(dy)
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight, dtype=torch.float32) if weight is not None and needs[1] else None
        dbias = torch.empty_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None
        masked = needs[3] and name != "none"
        dresidual = torch.empty_like(x) if masked else None
        code = run(
            native.pack_arguments(
                native.BACKWARD_TRAIN if training else native.BACKWARD_EVAL,
                _CODES[x.dtype],
                activation,
                ctx.aux,
                torch.get_num_threads(),
                *like,
                x.data_ptr(),
                0 if auxiliary is None else auxiliary.data_ptr(),
                dy.data_ptr(),
                dx.data_ptr(),
                0 if dresidual is None else dresidual.data_ptr(),
                0,
                0,
                0,
                0,
                saved.data_ptr(),
                0 if dweight is None else dweight.data_ptr(),
                0 if dbias is None else dbias.data_ptr(),
                eps,
                0.0,
                slope,
                cap,
            )
        )
        _done(code, x)
        if layout is not None:
            dx = dx.contiguous(memory_format=layout)
        return (
            dx if needs[0] else None,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            (dresidual if masked else dy) if needs[3] else None,
            None,
            None,
            None,
            None,
        )


def _done(code: int, x: Tensor) -> None:
    """Raise if the kernel could not do its work: its outputs are then not to be looked at."""
    if code == -1:
        raise MemoryError(f"no memory for the statistics of a batch of shape {list(x.shape)}")
    if code < 0:
        raise BatchNormError(f"the kernel refused an input of shape {list(x.shape)} (code {code})")


def _differentiable_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return gradients that have gradients: differentiate the definition, written out in elementary operations."""
    again = torch.is_grad_enabled()
    needs = ctx.needs_input_grad
    with torch.enable_grad():
        # Views, so that a tensor given twice, as input and as residual, has two gradients and not twice their sum.
        views: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
        x, weight, bias, saved, auxiliary = views
        _, _, _, training, _, eps, slope, name = ctx.setting
        mean = var = None
        if not training:
            mean = saved[0] + saved[1]
            var = saved[4].double().pow(-2).sub(eps).to(saved.dtype)
        if ctx.aux == AUX_OUTPUT:
            # The slope of a piecewise linear activation is a constant; the output tells which piece.
            inner, residual = "none", None
            dz = dy * _slope(auxiliary, name, slope)
        else:
            inner, residual, dz = name, auxiliary, dy
        inputs = [t for t, wanted in ((x, needs[0]), (weight, needs[1]), (bias, needs[2])) if wanted]
        if residual is not None and needs[3]:
            inputs.append(residual)
        grads: list[Any] = []
        if inputs:
            y = fallback.composite(x, mean, var, weight, bias, eps, inner, residual, slope)
            grads = list(torch.autograd.grad(y, inputs, dz, create_graph=again, allow_unused=True))
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


def _slope(y: Tensor, activation: str, negative_slope: float) -> Tensor:
    if activation == "relu6":
        return ((y > 0) & (y < 6)).to(y.dtype)
    low = negative_slope if activation == "leaky_relu" else 0.0
    return torch.where(y > 0, 1.0, low).to(y.dtype)


def _float32(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as the kernel reads it; bfloat16 parameters and odd strides cost a small copy."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.detach().to(torch.float32).contiguous()
