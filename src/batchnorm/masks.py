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
    if not isinstance(given, Tensor):
        raise _wrong(f"is of type {type(given).__name__}", x, where)
    samples, positions = x.shape[0], x.shape[2:]
    if given.dtype == torch.bool:
        if given.dim() == x.dim() and given.dim() >= 2 and given.shape[1] == 1:
            given = given.squeeze(1)
        if given.shape != (samples, *positions):
            raise _wrong(f"has dtype torch.bool and shape {list(given.shape)}", x, where)
        if given.device != x.device:
            raise _wrong(f"is on {given.device}, the input on {x.device}", x, where)
        return given
    lengths = given.unsqueeze(1) if given.dim() == 1 else given
    whole = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if not whole or not positions or lengths.shape != (samples, len(positions)):
        raise _wrong(f"has dtype {given.dtype} and shape {list(given.shape)}", x, where)
    mask = torch.ones((samples, *positions), dtype=torch.bool, device=x.device)
    for axis, size in enumerate(positions):
        shape = [1] * (1 + len(positions))
        shape[1 + axis] = size
        inside = torch.arange(size, device=x.device).view(shape)
        mask = mask & (inside < lengths[:, axis].to(x.device).view(-1, *[1] * len(positions)))
    return mask


def _wrong(given: str, x: Tensor, where: str) -> BatchNormError:
    positions = list(x.shape[2:])
    lengths = (
        f", or whole-number lengths of shape {[x.shape[0]] if len(positions) == 1 else [x.shape[0], len(positions)]}"
        if positions
        else ""
    )
    return BatchNormError(
        f"the mask {given}; the input has shape {list(x.shape)}",
        where=where,
        do=f"give a boolean tensor of shape {[x.shape[0], *positions]}, true where a position counts{lengths}",
    )
