"""What the forward pass saves for the backward pass: tensors, and the kernel's notes about the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.kernels.native import AUX_BITS, SAVED_ROWS
from batchnorm.kernels.storage import check_memory
from batchnorm.moments import Moments


class Setting(NamedTuple):
    """The settings of a call: everything except its tensors."""

    run: Any
    like: tuple[int, int, int]  # x as the kernel reads it: batch, channels, positions
    layout: torch.memory_format | None  # what the results are converted to
    training: bool
    momentum: float
    eps: float
    slope: float
    activation: str
    groups: int = 1
    samples: int = 0
    mask: Tensor | None = None  # uint8, one number per sample and position
    moments: Moments | None = None  # of the batch, if they are known
    reduce: Callable[[Tensor], Tensor] | None = None  # adds the backward sums of other processes


def end_of_rows(setting: Setting) -> int:
    """Return where the bits begin in the kernel's notes, behind rows of float32 (`bn_saved` in bn.h).

    >>> end_of_rows(Setting(None, (2, 16, 9), None, True, 0.1, 1e-5, 0.0, "relu"))  # five rows of 16 channels
    320

    Both are in one tensor, because each costs time in autograd, and in one of bytes, because those survive hooks that
    keep saved tensors in fewer digits.
    """
    return 4 * setting.groups * SAVED_ROWS * setting.like[1]


def length_of_notes(setting: Setting, aux: int) -> int:
    """Return the size in bytes of the rows and bits of a call.

    >>> length_of_notes(Setting(None, (2, 16, 9), None, True, 0.1, 1e-5, 0.0, "relu"), AUX_BITS)  # two bytes a row
    388
    """
    if aux != AUX_BITS:
        return end_of_rows(setting)
    batch, channels, positions = setting.like
    row = (channels + 7) // 8 if positions == 1 else channels * ((positions + 7) // 8)
    return end_of_rows(setting) + batch * row + 4


def unpacked(
    dtype: torch.dtype,
    length: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    notes: Tensor,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the saved tensors in their original types, whatever hooks did to them; only silu saves the residual.

    >>> notes = torch.zeros(320, dtype=torch.uint8)
    >>> x, *_ = unpacked(torch.bfloat16, 320, torch.zeros(2, 16), None, None, notes)
    >>> x.dtype
    torch.bfloat16
    """
    named = {"the input": x, "the statistics": notes, "the residual": residual, "the mask": mask}
    for name, tensor in named.items():
        check_memory(tensor, f"{name} saved for the backward pass", do="keep it until the backward pass is done")
    x, notes = x.resolve_neg(), notes.resolve_neg()
    residual = residual if residual is None else residual.resolve_neg()
    x = x if x.dtype is dtype else x.to(dtype)
    residual = residual if residual is None or residual.dtype is dtype else residual.to(dtype)
    if notes.numel() != length:
        raise BatchNormError(
            f"a hook on saved tensors gave back {notes.numel()} bytes of the {length} that it was given",
            do="return in its unpack hook what its pack hook was given",
        )
    if notes.dtype is not torch.uint8 or not notes.is_contiguous():
        notes = notes.to(torch.uint8).contiguous()
    if notes.storage_offset() % 4:  # floats are in it
        notes = notes.clone()
    return x, weight, bias, notes, residual, mask
