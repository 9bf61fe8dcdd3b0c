"""Batch normalisation in torch's own operators: every device and dtype, compilable, exportable, differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Apply an activation by name.

    >>> activate(torch.tensor([-2.0, 7.0]), "relu6", 0.01)
    tensor([0., 6.])
    """
    if activation == "relu":
        return F.relu(z)
    if activation == "relu6":
        return F.relu6(z)
    if activation == "leaky_relu":
        return F.leaky_relu(z, negative_slope)
    if activation == "silu":
        return F.silu(z)
    return z


def batch_norm(
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
) -> tuple[Tensor, Tensor | None]:
    """Normalise, add, activate; return the output, and whether the batch was finite (None if nothing was updated).

    >>> y, finite = batch_norm(torch.ones(2, 3), None, None, None, None, True, 0.1, 1e-5, "none", None, 0.01)
    >>> y.abs().max().item(), finite
    (0.0, None)

    The running statistics go through copies, and move only if all of them stay finite: written with `where`, this
    holds in a compiled graph too.
    """
    finite = None
    if training and running_mean is not None and running_var is not None:
        new_mean, new_var = running_mean.clone(), running_var.clone()
        y = F.batch_norm(x, new_mean, new_var, weight, bias, True, momentum, eps)
        # A statistic that was not finite before is not this batch's fault.
        finite = (
            (torch.isfinite(new_mean) | ~torch.isfinite(running_mean)).all()
            & (torch.isfinite(new_var) | ~torch.isfinite(running_var)).all()
        )  # fmt: skip
        running_mean.copy_(torch.where(finite, new_mean, running_mean))
        running_var.copy_(torch.where(finite, new_var, running_var))
    else:
        if running_mean is not None and running_var is not None and torch.is_grad_enabled() and not _recorded():
            # The backward pass needs these numbers, whatever a training step makes of the buffers until then.
            running_mean, running_var = running_mean.clone(), running_var.clone()
        y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if residual is not None:
        y = y + residual
    return activate(y, activation, negative_slope), finite


def _recorded() -> bool:
    """Whether an exporter or a tracer is writing the operations down: a copy would stay in its graph for nothing."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def composite(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Write the definition out in elementary operations, whose derivatives of every order torch knows.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> composite(x, None, None, None, None, 0.0, "none", None, 0.01).flatten()
    tensor([-1.,  1.])
    """
    axes = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if mean is None or var is None:
        centred = x - x.mean(axes, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    else:
        centred = x - mean.reshape(shape)
        scale = torch.rsqrt(var.reshape(shape) + eps)
    z = centred * scale
    if weight is not None:
        z = z * weight.reshape(shape)
    if bias is not None:
        z = z + bias.reshape(shape)
    if residual is not None:
        z = z + residual
    return activate(z, activation, negative_slope)
