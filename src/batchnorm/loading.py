"""What a user types, as objects: a model, an example to call it with, batches of data, a checkpoint."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from batchnorm.batches import Batch, call_batch, load_batches
from batchnorm.checkpoints import load_into, load_state, save_state
from batchnorm.errors import BatchNormError, first_line
from batchnorm.specs import made_by

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Batch", "call_batch", "load_batches", "load_model", "load_state", "parse_input", "save_state"]


def load_model(spec: str, checkpoint: str | os.PathLike[str] | None = None, *, key: str = "") -> nn.Module:
    """Make the model that ``file.py:factory`` or ``package.module:factory`` names; put a checkpoint into it.

    >>> load_model("torch.nn:ReLU")
    ReLU()
    >>> load_model("network.py:make")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no file network.py; write file.py:factory or package.module:factory

    The factory is called without arguments and returns the model; a class will do, and so will a model itself. The
    folder of the file is importable from then on, as it is for a script; for a module, the current folder is.
    ``key`` says under which key of the checkpoint the model is, where that is not clear (see `load_state`).
    """
    from torch import nn

    model = made_by(spec, nn.Module)
    if not isinstance(model, nn.Module):
        raise BatchNormError(
            f"{spec} gives a {type(model).__name__}, not a torch.nn.Module", do="name a function that returns a model"
        )
    if checkpoint is not None:
        load_into(model, checkpoint, key=key)
    return model


def parse_input(text: str, *, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    """Make the example that a text describes: random numbers of these sizes, the same ones every time.

    >>> parse_input("8,3,224,224").shape
    torch.Size([8, 3, 224, 224])
    >>> tokens, mask = parse_input("2,5:int64<1000; 2,5:bool")
    >>> tokens.dtype, mask.dtype
    (torch.int64, torch.bool)
    >>> list(parse_input("input_ids=2,5:int64<1000; scale=2,5"))
    ['input_ids', 'scale']

    Floating-point numbers are normally distributed; whole ones are from 0 up to below the number after ``<``, by
    default below 2. Several inputs have ``;`` between them and give a tuple; with names, a dictionary of keyword
    arguments. ``dtype`` is that of inputs that name none, by default float32.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    parts = [part.strip() for part in text.split(";") if part.strip()]
    drawn: list[tuple[str, torch.Tensor]] = []
    for part in parts:
        found = _INPUT.fullmatch(part)
        sizes = [int(size) for size in re.split("[,x]", found["sizes"])] if found else []
        kind = getattr(torch, found["dtype"] or "", None) if found else None
        if not found or (found["dtype"] and not isinstance(kind, torch.dtype)):
            raise BatchNormError(
                f"the input {part!r} is not sizes such as 8,3,224,224 or 8,128:int64<1000",
                do="write sizes, then :dtype if it is not float32, then <N for whole numbers below N",
            )
        if 0 in sizes:
            raise BatchNormError(f"the input {part!r} has no elements", do="give sizes from 1 up")
        kind = kind or dtype or torch.float32
        if found["below"] and (kind.is_floating_point or kind.is_complex or kind is torch.bool):
            raise BatchNormError(f"the input {part!r} has <{found['below']}, which only whole numbers can have")
        drawn.append((found["name"] or "", _drawn(part, sizes, kind, found["below"], generator)))
    names = [name for name, _ in drawn if name]
    if not drawn or (names and len(set(names)) != len(drawn)):
        raise BatchNormError(
            f"the input {text!r} gives names to some of its parts only, or a name twice" if drawn else "no input given",
            do="write it as 8,3,224,224",
        )
    if names:
        return dict(drawn)
    return drawn[0][1] if len(drawn) == 1 else tuple(tensor for _, tensor in drawn)


_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<sizes>\d+(?:\s*[,x]\s*\d+)*)\s*(?::\s*(?P<dtype>\w+))?\s*(?:<\s*(?P<below>\d+))?"
)


def _drawn(
    part: str, sizes: list[int], dtype: torch.dtype, below: str | None, generator: torch.Generator
) -> torch.Tensor:
    import torch

    try:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float32
            return torch.randn(sizes, generator=generator, dtype=wide).to(dtype)
        return torch.randint(0, int(below or 2), sizes, generator=generator).to(dtype)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BatchNormError(f"the input {part!r} cannot be made: {first_line(error)}") from error
