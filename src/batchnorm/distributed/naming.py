"""Names of layers in messages: the path in the model, looked up only when needed."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Sequence

from torch import nn


def paths_of(layers: Sequence[nn.Module]) -> list[str]:
    """Return each layer's path in the largest model that holds it, or nothing if it stands alone.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    >>> paths_of([model[1][0], model])
    ['1.0', '']

    It looks through every object of the process, so it is for messages only. A wrapper's ``module.`` is left out.
    """
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for thing in gc.get_objects():
        # By type: asking an arbitrary object for its __class__ may run its code.
        if issubclass(type(thing), nn.Module):
            for name, child in thing.__dict__.get("_modules", {}).items():
                if child is not None:
                    parents.setdefault(id(child), []).append((thing, name))

    def climb(module: nn.Module, below: frozenset[int]) -> list[str]:
        longest: list[str] = []
        for parent, name in parents.get(id(module), ()):
            if id(parent) not in below:
                longest = max(longest, [*climb(parent, below | {id(parent)}), name], key=len)
        return longest

    return [
        getattr(layer, "_path", "") or ".".join(climb(layer, frozenset((id(layer),)))).removeprefix("module.")
        for layer in layers
    ]


def titles(layers: Sequence[nn.Module]) -> list[str]:
    """Say which layers these are, in words for a message.

    >>> model = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})
    >>> titles([model["norm"], nn.BatchNorm1d(3)])
    ["'norm' (BatchNorm1d, 2 channels)", 'a layer (BatchNorm1d, 3 channels)']
    """
    found = []
    for layer, path in zip(layers, paths_of(layers), strict=True):
        kind = f"{type(layer).__name__}, {getattr(layer, 'num_features', '?')} channels"
        found.append(f"{path!r} ({kind})" if path else f"a layer ({kind})")
    return found


def mark(layer: nn.Module) -> int:
    """Return a number that stands for the path `convert` gave a layer; 0 if it has none.

    >>> mark(nn.BatchNorm1d(2))
    0
    """
    path = getattr(layer, "_path", "")
    return zlib.crc32(path.encode()) or 1 if path else 0
