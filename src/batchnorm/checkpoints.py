"""Checkpoints in and out: tensors by name, whatever they are wrapped in, and never anything that runs."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchnorm.errors import BatchNormError
from batchnorm.files import check_regular, replacing
from batchnorm.inflated import check_inflated, check_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

PICKLED = (".pt", ".pth", ".ckpt", ".bin")
SUFFIXES = (*PICKLED, ".safetensors")
# Where trainers keep the model's state inside a checkpoint, in the order in which they are looked for.
_NESTINGS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DDP, of torch.compile, of Lightning and many others
_INSIDE = "_orig_mod."  # torch.compile of a part of a model puts this in the middle


def load_state(path: str | os.PathLike[str], *, key: str = "", names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read a checkpoint: the tensors by name, without what trainers and wrappers put around them.

    >>> load_state("no_such.pt")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no file no_such.pt; give the path of a checkpoint

    A ``.safetensors`` file, or one of ``torch.save`` (``.pt``, ``.pth``, ``.ckpt``, ``.bin``). Only tensors and plain
    containers are read: a file that asks for anything else is refused, and nothing in it runs. Of a checkpoint with
    more than the model in it (``{"state_dict": ..., "epoch": 3}``) the model's part is taken, or the one that ``key``
    names, with dots for what is deeper. ``module.`` (DDP) and ``_orig_mod.`` (torch.compile) in front of all names go.
    With ``names``, those of the model, whatever of these and ``model.`` (Lightning) makes the names fit goes.
    """
    state = _state_in(load_tensors(path), Path(path), key)
    return _without_prefixes(state) if names is None else _fitting(state, set(names))


def load_into(model: nn.Module, path: str | os.PathLike[str], *, key: str = "") -> None:
    """Put a checkpoint into a model; refuse one that does not fit, before anything is changed.

    >>> from torch import nn
    >>> load_into(nn.Linear(2, 1), "no_such.safetensors")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no file no_such.safetensors; give the path of a checkpoint
    """
    wanted = model.state_dict()
    state = load_state(path, key=key, names=wanted)
    wrong = mismatch(state, wanted)
    if wrong:
        raise BatchNormError(
            f"{path} does not fit the model: {wrong}", do="give the checkpoint of this model, or the model of this one"
        )
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BatchNormError(f"{path} does not fit the model: {_one_line(error)}") from error


def mismatch(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which names and shapes a checkpoint and a model differ; nothing if they do not.

    >>> import torch
    >>> mismatch({"a": torch.zeros(2), "c": torch.zeros(1)}, {"a": torch.zeros(3), "b": torch.zeros(1)})
    '1 of 2 is missing (b), 1 is unexpected (c), 1 has another shape (a is [2] in the file and [3] in the model)'
    """
    from torch import Tensor
    from torch.nn.parameter import is_lazy

    # Files from before torch 0.4.1 have no num_batches_tracked, and torch does without.
    missing = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in wanted]
    shaped = [
        f"{name} is {list(tensor.shape)} in the file and {list(wanted[name].shape)} in the model"
        for name, tensor in state.items()
        if isinstance(wanted.get(name), Tensor)
        and isinstance(tensor, Tensor)
        and not is_lazy(wanted[name])
        and tensor.shape != wanted[name].shape
    ]
    return ", ".join(
        words
        for words in (
            _count(missing, "is missing", "are missing", f" of {len(wanted)}"),
            _count(unexpected, "is unexpected", "are unexpected"),
            _count(shaped, "has another shape", "have other shapes", at_most=1),
        )
        if words
    )


def save_state(state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Path:
    """Write tensors by name, in one step: as safetensors or with ``torch.save``, by the suffix.

    >>> save_state({}, "model.txt")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: the file is named 'model.txt'; end its name in .pt, .pth, .ckpt, .bin or \
.safetensors
    """
    import torch

    target = Path(path)
    check_suffix(target, SUFFIXES)
    with replacing(target) as temporary:
        if target.suffix == ".safetensors":
            from safetensors.torch import save

            # Tensors that share memory (tied weights) are written as often as they are named.
            temporary.write_bytes(save({name: t.detach().cpu().clone().contiguous() for name, t in state.items()}))
        else:
            content = io.BytesIO()  # torch's writer of files ends the process where the disk is full
            torch.save(dict(state), content)
            temporary.write_bytes(content.getvalue())
    return target


def check_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise for a file name that does not say what to write.

    >>> check_suffix(Path("model.pt"), SUFFIXES)
    """
    if path.suffix not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise BatchNormError(f"the file is named {path.name!r}", do=f"end its name in {known}")


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """Read what a file holds: tensors in plain containers, and nothing that runs.

    >>> load_tensors("model.json")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no file model.json; give the path of a checkpoint
    """
    file = Path(path)
    if file.is_dir():
        raise BatchNormError(f"{path} is a folder", do="name the file in it")
    if not file.exists():
        raise BatchNormError(f"there is no file {path}", do="give the path of a checkpoint")
    check_suffix(file, SUFFIXES)
    check_regular(file)
    if file.suffix == ".safetensors":
        return _safetensors(file)
    check_inflated(file)
    held = _unpickled(file)
    check_tensors(held, file)
    return held


def _safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except Exception as error:
        raise BatchNormError(f"{file} is not a safetensors file ({_one_line(error)})") from error


def _unpickled(file: Path) -> Any:
    import pickle

    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is None:
            raise _unreadable(file) from error
        raise BatchNormError(
            f"{file} was refused, and nothing in it was run: it holds more than tensors (it asks for {asked[1]})",
            do="where you trust it, load it and save model.state_dict() alone",
        ) from error
    except Exception as error:
        raise _unreadable(file) from error


def _unreadable(file: Path) -> BatchNormError:
    return BatchNormError(f"{file} is not a file that torch.save wrote", do="give a checkpoint of tensors")


def _state_in(found: Any, file: Path, key: str) -> dict[str, Tensor]:
    """The tensors by name, out of what a checkpoint holds."""
    if key:
        return _at(found, file, key)
    state = _unwrapped(found)
    if state is None:
        if not isinstance(found, Mapping):
            raise BatchNormError(f"{file} holds a {type(found).__name__}, not tensors by name")
        held = ", ".join(map(repr, list(found)[:8])) or "nothing"
        raise BatchNormError(
            f"{file} holds {held}, and it is not clear which is the model", do="name it with key= (--key)"
        )
    return state


def _at(found: Any, file: Path, key: str) -> dict[str, Tensor]:
    """The tensors under a key, or under keys with dots between them."""
    inner = found
    for part in [key] if isinstance(found, Mapping) and key in found else key.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            held = ", ".join(map(repr, list(inner)[:8])) if isinstance(inner, Mapping) else type(inner).__name__
            raise BatchNormError(f"{file} has no {key!r}; it holds {held}")
        inner = inner[part]
    state = _unwrapped(inner)
    if state is None:
        raise BatchNormError(f"{key!r} in {file} is not tensors by name")
    return state


def _unwrapped(found: Any, seen: dict[int, dict[str, Tensor] | None] | None = None) -> dict[str, Tensor] | None:
    """The state of a model in a checkpoint; None if there is none, or several and no telling which."""
    if not isinstance(found, Mapping):
        return None
    seen = {} if seen is None else seen
    if id(found) not in seen:
        seen[id(found)] = None  # a dictionary that holds itself holds no model there
        inner = {str(name): value for name, value in found.items() if isinstance(value, Mapping)}
        seen[id(found)] = _chosen(found, inner, seen)
    return seen[id(found)]


def _chosen(
    found: Mapping[Any, Any], inner: dict[str, Any], seen: dict[int, dict[str, Tensor] | None]
) -> dict[str, Tensor] | None:
    from torch import Tensor

    for name in _NESTINGS:
        state = _unwrapped(inner.get(name), seen)
        if state:
            return state
    if not inner and any(isinstance(value, Tensor) for value in found.values()):
        return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    states = [state for state in (_unwrapped(value, seen) for value in inner.values()) if state]
    return states[0] if len(states) == 1 else None


def _without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take away what wrappers put before all names."""
    for prefix in ("module.", _INSIDE) * 2:
        if state and all(name.startswith(prefix) for name in state):
            state = {name[len(prefix) :]: tensor for name, tensor in state.items()}
    return state


def _fitting(state: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Return the state under the names that fit best. Other entries are dropped only if the whole model is found."""
    needed = {name for name in wanted if not name.endswith("num_batches_tracked")}
    candidates = [state]
    for start in candidates:  # grows while it is read
        if len(candidates) > 12:
            break
        plain = {name.replace(_INSIDE, ""): tensor for name, tensor in start.items()}
        if len(plain) == len(start) and list(plain) != list(start):
            candidates.append(plain)
        for prefix in _PREFIXES:
            under = {name[len(prefix) :]: t for name, t in start.items() if name.startswith(prefix)}
            if under and (len(under) == len(start) or needed <= set(under)):
                candidates.append(under)
    return max(candidates, key=lambda c: len(wanted & set(c)) - len(set(c) - wanted))


def _count(items: list[str], one: str, many: str, of: str = "", at_most: int = 3) -> str:
    if not items:
        return ""
    more = ", ..." if len(items) > at_most else ""
    return f"{len(items)}{of} {one if len(items) == 1 else many} ({', '.join(items[:at_most])}{more})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
