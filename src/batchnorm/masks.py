"""Which positions of a padded batch count: a boolean mask, or lengths, made into one kind of tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError


def as_mask(given: Tensor, x: Tensor, where: str = "batch_norm") -> Tensor:
    """Return a boolean tensor of the shape of ``x`` without its channels: true where a position counts.

    >>> as_mask(torch.tensor([3, 1]), torch.zeros(2, 8, 4))
    tensor([[ True,  True,  True, False],
            [ True, False, False, False]])

    ``given`` is either boolean, of that shape (or with a channel axis of size 1), or whole numbers: the length of
    each sample along the one position axis, shape (N,), or along each of several, shape (N, axes).
    """
    samples, positions = x.shape[0], x.shape[2:]
    if given.dtype == torch.bool:
        if given.dim() == x.dim() and given.dim() >= 2 and given.shape[1] == 1:
            given = given.squeeze(1)
        if given.shape != (samples, *positions):
            raise _wrong(given, x, where)
        return given
    if given.dtype.is_floating_point or given.dtype.is_complex or not positions:
        raise _wrong(given, x, where)
    lengths = given.unsqueeze(1) if given.dim() == 1 else given
    if lengths.shape != (samples, len(positions)):
        raise _wrong(given, x, where)
    mask = torch.ones((samples, *positions), dtype=torch.bool, device=x.device)
    for axis, size in enumerate(positions):
        shape = [1] * (1 + len(positions))
        shape[1 + axis] = size
        inside = torch.arange(size, device=x.device).view(shape)
        mask = mask & (inside < lengths[:, axis].to(x.device).view(-1, *[1] * len(positions)))
    return mask


def _wrong(given: Tensor, x: Tensor, where: str) -> BatchNormError:
    positions = list(x.shape[2:])
    lengths = (
        f", or whole-number lengths of shape {[x.shape[0]] if len(positions) == 1 else [x.shape[0], len(positions)]}"
        if positions
        else ""
    )
    return BatchNormError(
        f"the mask has dtype {given.dtype} and shape {list(given.shape)}, the input shape {list(x.shape)}",
        where=where,
        do=f"give a boolean mask of shape {[x.shape[0], *positions]}, true where a position counts{lengths}",
    )
