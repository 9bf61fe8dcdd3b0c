"""Moments as a value: how many numbers, their mean, their variance. Merging them, and what running statistics keep."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """The count, mean and biased variance of each channel, in float64 (where the device has it).

    >>> a = Moments(torch.tensor(2.0), torch.tensor([1.0]), torch.tensor([0.0]))
    >>> a.mean
    tensor([1.])

    ``mean`` and ``var`` have the shape (channels,), or (groups, channels) with a ``count`` of shape (groups,).
    """

    count: Tensor  # type: ignore[assignment]  # not the method of tuples
    mean: Tensor
    var: Tensor


def merged(parts: Moments) -> Moments:
    """Return the moments of all groups taken together.

    >>> parts = Moments(torch.tensor([2.0, 1.0]), torch.tensor([[1.0], [4.0]]), torch.tensor([[1.0], [0.0]]))
    >>> merged(parts)  # of 0, 2 and 4
    Moments(count=tensor(3.), mean=tensor([2.]), var=tensor([2.6667]))

    Exact, whatever the counts (Chan, Golub & LeVeque 1979): the variance within the groups and the one between them.
    A group without values does not count; moments without groups stay as they are.
    """
    if parts.mean.dim() == 1:
        return parts
    count = parts.count.sum()
    share = (parts.count / count.clamp(min=1)).unsqueeze(1)
    mean = _weighted(share, parts.mean)
    return Moments(count, mean, _weighted(share, parts.var + (parts.mean - mean) ** 2))


def _weighted(share: Tensor, values: Tensor) -> Tensor:
    # Not a product alone: what stands for the mean of no values may be NaN.
    return torch.where(share > 0, share * values, 0).sum(0)


def distance(mean: Tensor, var: Tensor, of_mean: Tensor, of_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return how far statistics are from reference ones, as the root mean square over channels (the last dimension).

    >>> distance(torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([1.0]), torch.tensor([1.0]), eps=0.0)
    (tensor(2.), tensor(1.3863))

    The means in standard deviations of the reference, the variances as the natural logarithm of their ratio.
    """
    width = of_var + eps
    off, apart = (mean - of_mean) / width.sqrt(), ((var + eps) / width).log()
    return off.square().mean(-1).sqrt(), apart.square().mean(-1).sqrt()


@torch.no_grad()
def update_running(running_mean: Tensor, running_var: Tensor, moments: Moments, momentum: float) -> Tensor:
    """Let the running statistics follow a batch, all of them or, if its moments are not finite, none.

    >>> mean, var = torch.zeros(1), torch.ones(1)
    >>> update_running(mean, var, Moments(torch.tensor(2.0), torch.tensor([7.0]), torch.tensor([1.0])), 0.5)
    tensor(True)
    >>> mean, var  # the batch's variance is remembered as the unbiased one
    (tensor([3.5000]), tensor([1.5000]))

    Returns, as a tensor, whether the batch was fit for it. One of fewer than two values is, but moves nothing.
    """
    count, mean, var = moments
    unbiased = var * (count / (count - 1).clamp(min=1))
    new_mean = (momentum * mean + (1 - momentum) * running_mean.to(mean.dtype)).to(running_mean.dtype)
    new_var = (momentum * unbiased + (1 - momentum) * running_var.to(var.dtype)).to(running_var.dtype)
    some = count > 1
    return replace_if_finite(
        running_mean, running_var, torch.where(some, new_mean, running_mean), torch.where(some, new_var, running_var)
    )


def replace_if_finite(running_mean: Tensor, running_var: Tensor, new_mean: Tensor, new_var: Tensor) -> Tensor:
    """Write the new statistics into the buffers if all are finite; else leave every one as it was.

    >>> mean, var = torch.zeros(2), torch.ones(2)
    >>> replace_if_finite(mean, var, torch.tensor([3.0, float("nan")]), torch.ones(2))
    tensor(False)
    >>> mean
    tensor([0., 0.])

    Written with ``where``, this holds in a compiled graph too.
    """
    # A statistic that was not finite before is not this batch's fault.
    finite = (
        (torch.isfinite(new_mean) | ~torch.isfinite(running_mean)).all()
        & (torch.isfinite(new_var) | ~torch.isfinite(running_var)).all()
    )  # fmt: skip
    running_mean.copy_(torch.where(finite, new_mean, running_mean))
    running_var.copy_(torch.where(finite, new_var, running_var))
    return finite
