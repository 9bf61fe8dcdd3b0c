"""Which positions of a padded batch count: a boolean mask, or lengths, made into one kind of tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError


def readable(tensor: Tensor) -> bool:
    """Whether a look at the values costs no wait and disturbs no transformation.

    >>> readable(torch.zeros(2)), readable(torch.zeros(2, device="meta"))
    (True, False)
    """
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


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
    if readable(given) and lengths.numel():
        for axis, size in enumerate(positions):
            low, high = int(lengths[:, axis].min()), int(lengths[:, axis].max())
            if low < 0 or high > size:
                raise _wrong(f"has a length of {low if low < 0 else high} for an axis of {size}", x, where)
    mask = torch.ones((samples, *positions), dtype=torch.bool, device=x.device)
    for axis, size in enumerate(positions):
        shape = [1] * (1 + len(positions))
        shape[1 + axis] = size
        inside = torch.arange(size, device=x.device).view(shape)
        mask = mask & (inside < lengths[:, axis].to(x.device).view(-1, *[1] * len(positions)))
    return mask


def check_counts(mask: Tensor, groups: int, where: str) -> None:
    """Raise for a mask that leaves a group of samples with fewer than two positions; one that cannot be read passes.

    >>> check_counts(torch.tensor([[True, False], [False, False]]), 1, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: Expected more than 1 value per channel when training, but the mask leaves 1 \
of the 4 in the batch; drop such batches, or normalise with running statistics (eval(), or statistics="running")
    """
    if not readable(mask):
        return
    parts = mask.tensor_split([g * len(mask) // groups for g in range(1, groups)])
    left, places = min((int(part.sum()), part.numel()) for part in parts)
    if left < 2:
        raise BatchNormError(
            f"Expected more than 1 value per channel when training, but the mask leaves {left} of the {places} in "
            + ("the batch" if groups == 1 else "a group"),
            where=where,
            do='drop such batches, or normalise with running statistics (eval(), or statistics="running")',
        )


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
