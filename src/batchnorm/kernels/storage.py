"""Check that a tensor's memory exists: its storage can be freed or shrunk, and torch does not check."""

from __future__ import annotations

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError

_PLAIN = (Tensor, torch.nn.Parameter)


def bytes_needed(tensor: Tensor) -> int:
    """Return how far into its storage a tensor reaches, in bytes.

    >>> bytes_needed(torch.zeros(4, 3)[1:, 0])  # the last of its elements is the tenth
    40
    """
    shape, stride = tensor.shape, tensor.stride()
    if 0 in shape:
        return 0
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return int(last + 1) * tensor.element_size()


def fits(tensor: Tensor) -> bool:
    """Whether a plain tensor keeps all its elements within its storage.

    >>> x = torch.zeros(9)
    >>> _ = x.untyped_storage().resize_(8)
    >>> fits(x), fits(x[:2])
    (False, True)
    """
    return bytes_needed(tensor) <= tensor.untyped_storage().nbytes()


def check_memory(tensor: Tensor | None, name: str, where: str = "", do: str = "") -> None:
    """Raise if a tensor reaches beyond its storage; tensors without a storage pass.

    >>> x = torch.zeros(9)
    >>> _ = x.untyped_storage().resize_(8)
    >>> check_memory(x, "weight", "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: the memory of weight was freed: its shape [9] needs 36 bytes, its storage \
has 8; keep the tensor until the call is done, or fill it again before
    """
    if tensor is None or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return
    try:
        needed, there = bytes_needed(tensor), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # one of a transform, or zeros without memory
        return
    if needed > there and not torch._is_zerotensor(tensor):
        raise BatchNormError(
            f"the memory of {name} was freed: its shape {list(tensor.shape)} needs {needed} bytes, its storage has "
            f"{there}",
            where=where,
            do=do or "keep the tensor until the call is done, or fill it again before",
        )
