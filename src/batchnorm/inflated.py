"""Small files that would fill the memory: archives that expand, and tensors that repeat a few numbers for ever."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchnorm.errors import BatchNormError

MOST = 1 << 30  # bytes up to which any file may expand
FACTOR = 100  # beyond, by how much: numbers of a network shrink by less than a tenth, masks and labels by 10 to 50


def check_inflated(file: Path) -> None:
    """Raise for a zip archive (.npz, .pt) whose entries are far larger than the file, before any is read.

    >>> check_inflated(Path("no-such.npz"))

    Readers stop at the size that an entry declares, so the sum of these is what reading would cost at most.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            expanded = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return  # no archive: what it is, its reader says
    size = os.path.getsize(file)
    if expanded > MOST and expanded > FACTOR * size:
        raise BatchNormError(
            f"{file} has {_bytes(size)} and would expand to {_bytes(expanded)}; it was not read",
            do="where you trust it, save it uncompressed (numpy.savez, torch.save)",
        )


def check_tensors(held: Any, file: Path) -> None:
    """Raise for tensors that are far larger than the numbers they are made of (strides of 0), and nested ones.

    >>> import torch
    >>> check_tensors({"w": torch.zeros(1).expand(10**12)}, Path("a.pt"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: a.pt: w repeats 4 bytes until it has 3.6 TiB; save w.contiguous(), if that fits
    """
    import torch

    seen: set[int] = set()
    waiting = [("", held)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:  # a container may hold itself, or another a thousand times
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{name}[{place}]", inner) for place, inner in enumerate(value)]
        elif isinstance(value, torch.Tensor):
            if value.is_nested:  # has no shape to compare, and no number of elements
                raise BatchNormError(
                    f"{name or 'it'} is a nested tensor", where=str(file), do="save a plain tensor for each part of it"
                )
            size = value.numel() * value.element_size()
            stored = value.untyped_storage().nbytes() if value.layout is torch.strided and not value.is_meta else 0
            if size > MOST and size > FACTOR * stored:
                what = f"{name} " if name else "the tensor "
                raise BatchNormError(
                    f"{what}repeats {_bytes(stored)} until it has {_bytes(size)}",
                    where=str(file),
                    do=f"save {name or 'it'}.contiguous(), if that fits",
                )


def _bytes(number: int) -> str:
    amount = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"
