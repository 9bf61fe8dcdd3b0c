"""Tensors in whatever a model takes and gives: tuples, dictionaries, dataclasses, objects of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

DEPTH = 12  # deeper than this there are no arguments, only the internals of objects
# What has no tensors of a call inside.
CLOSED = (str, bytes, int, float, complex, bool, type(None), type, nn.Module, FunctionType, MethodType, ModuleType,
          torch.dtype, torch.device, torch.Size, torch.Generator)  # fmt: skip


def tensors_in(*things: Any) -> list[Tensor]:
    """Return the tensors in any structure, each once, in order; modules and functions are not looked into.

    >>> from types import SimpleNamespace
    >>> x, y = torch.zeros(1), torch.ones(1)
    >>> tensors_in(x, {"a": [y, x]}, SimpleNamespace(hidden=y))
    [tensor([0.]), tensor([1.])]
    """
    found: dict[int, Tensor] = {}
    for thing in things:
        if isinstance(thing, Tensor):  # nearly always
            found.setdefault(id(thing), thing)
        else:
            for tensor in _walk(thing, set(), DEPTH):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def _walk(thing: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, CLOSED) or depth == 0 or id(thing) in seen:
        return
    seen.add(id(thing))
    inside: list[Any] = []
    if isinstance(thing, Mapping):
        inside += thing.values()
    elif isinstance(thing, (tuple, list, set, frozenset)):
        inside += thing
    inside += getattr(thing, "__dict__", {}).values()
    inside += [
        getattr(thing, name) for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)
    ]  # fmt: skip
    for item in inside:
        yield from _walk(item, seen, depth - 1)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    # A class of C's, such as a tuple's, has none; "__dict__" as a slot was looked at already.
    return tuple(name for name in names if not name.startswith("__"))


def fresh(example: Any, draw: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Return a copy, with new tensors: a model may write into what it is given.

    >>> x = torch.zeros(1)
    >>> a, b = fresh((x, x))
    >>> a is b, a is x
    (True, False)
    """
    made: dict[int, Tensor] = {}

    def new(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            if id(thing) not in made:
                made[id(thing)] = draw(thing.detach())
            return made[id(thing)]
        inner = tensors_in(thing)
        if not inner:
            return thing
        # An object of the user's own: copied whole, with the new tensors in the place of the old ones.
        return copy.deepcopy(thing, {id(tensor): new(tensor) for tensor in inner})

    return tree_map(new, example)


def few_samples(given: Any, samples: int = 4) -> Any:
    """Return the first samples of a batch: enough to tell two functions apart.

    >>> few_samples((torch.zeros(32, 3), torch.zeros(7)))[0].shape
    torch.Size([4, 3])
    """
    sizes = {t.shape[0] for t in tensors_in(given) if t.dim() > 1}
    if len(sizes) != 1 or max(sizes) <= samples:
        return given
    return fresh(given, lambda t: t[:samples] if t.dim() > 1 else t)
