"""Memory layouts: bring a tensor into one that the kernel can read."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16  # the widest vector
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense(x: Tensor, masked: bool) -> tuple[Tensor, tuple[int, int, int], torch.memory_format | None]:
    """Return the tensor in a layout that the kernel reads, that layout as (batch, channels, positions), and the memory
    format to give the results if the kernel does not read the one of ``x``.

    >>> x = torch.zeros(2, 16, 3, 3)
    >>> dense(x, False)[1], dense(x.contiguous(memory_format=torch.channels_last), False)[1]
    ((2, 16, 9), (18, 16, 1))
    """
    shape = x.shape
    batch, channels = shape[0], shape[1]
    if x.is_contiguous():
        positions = x.numel() // (batch * channels)
        if masked and 1 < positions < LANES:  # too short for masked runs: rows of channels instead
            return by_rows(x), (batch * positions, channels, 1), torch.contiguous_format
        return x, (batch, channels, positions), None
    dims = x.dim()
    if dims > 2 and channels >= LANES and x.movedim(1, -1).is_contiguous():
        return x, (x.numel() // channels, channels, 1), None
    layout = _CHANNELS_LAST.get(dims) if x.stride(1) == 1 and x.stride(-1) >= channels else None
    if layout is not None and channels >= LANES:
        return x.contiguous(memory_format=layout), (x.numel() // channels, channels, 1), None
    found, like, again = dense(x.contiguous(), masked)
    return found, like, layout or again


def by_rows(x: Tensor) -> Tensor:
    """Return the tensor with the channels of a position next to each other, as channels_last has them.

    >>> by_rows(torch.zeros(2, 3, 4)).stride()
    (12, 1, 3)
    """
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
