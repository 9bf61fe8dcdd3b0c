"""The memory layout of a model's weights, and changing it: contiguous or channels_last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout_of(model: nn.Module) -> str | None:
    """Return in which layout a model's convolutions have their weights; None if none could have another.

    >>> layout_of(nn.Conv2d(4, 8, 3)), layout_of(nn.Linear(4, 8))
    ('contiguous', None)
    """
    weights = [p for p in model.parameters() if p.dim() in _FORMATS and p.shape[1] > 1 and max(p.shape[2:]) > 1]
    if not weights:
        return None
    last = sum(w.is_contiguous(memory_format=_FORMATS[w.dim()]) for w in weights)
    return "channels_last" if 2 * last > len(weights) else "contiguous"


def other_layout(model: nn.Module) -> str | None:
    """Return the layout that a model's convolutions do not have; None if there is no other.

    >>> other_layout(nn.Conv2d(4, 8, 3))
    'channels_last'
    """
    return {"channels_last": "contiguous", "contiguous": "channels_last"}.get(layout_of(model) or "")


def in_layout(model: nn.Module, layout: str) -> nn.Module:
    """Give a model's weights a memory layout, in place: each parameter stays the object that it was.

    >>> model = in_layout(nn.Conv2d(4, 8, 3), "channels_last")
    >>> model.weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() in _FORMATS:
                tensor.data = tensor.data.contiguous(memory_format=format_of(tensor, layout))
    return model


def format_of(tensor: Tensor, layout: str) -> torch.memory_format:
    """Return the memory format of a tensor in a layout.

    >>> format_of(torch.zeros(1, 2, 3, 4), "channels_last")
    torch.channels_last
    """
    return _FORMATS[tensor.dim()] if layout == "channels_last" else torch.contiguous_format
