"""Batch Normalization of many copies at once: the channels of all copies side by side, in one call of the kernel.

The statistics of a channel do not depend on its neighbours, so these are exactly the statistics of each copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchnorm.functional import moments, normalize
from batchnorm.moments import Moments, update_running


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalise each copy with its own batch and update its running statistics: training mode.

    >>> x, gamma, beta = torch.randn(2, 3, 8), torch.ones(2, 3), torch.zeros(2, 3)
    >>> y = batch_norm(x, torch.zeros(2, 3), torch.ones(2, 3), gamma, beta)
    >>> y.shape, bool(y.mean(2).abs().max() < 1e-6)
    (torch.Size([2, 3, 8]), True)

    ``x`` and ``residual`` are (copies, channels, batch), everything else (copies, channels). A copy whose batch is not
    finite keeps its running statistics, as a layer does; the others update theirs.
    """
    rows = (1, mean.numel(), x.shape[2])
    y, finite = normalize(
        x.reshape(rows), mean.view(-1), var.view(-1), weight.reshape(-1), bias.reshape(-1), True, momentum, eps,
        activation, None if residual is None else residual.reshape(rows), 0.01,
    )  # fmt: skip
    if finite is not None and not bool(finite):  # one copy has diverged, and the kernel updated none
        found = moments(x.detach().reshape(rows))
        for copy, (its_mean, its_var) in enumerate(zip(found.mean.view_as(mean), found.var.view_as(var), strict=True)):
            update_running(mean[copy], var[copy], Moments(found.count, its_mean, its_var), momentum)
    return y.view_as(x)


def affine(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a layer in evaluation mode, for all copies.

    >>> scale, shift = affine(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2), eps=0.0)
    >>> scale.tolist(), shift.tolist()
    ([[1.0, 1.0]], [[-1.0, -1.0]])
    """
    scale = weight * torch.rsqrt(var + eps)
    return scale, bias - mean * scale
