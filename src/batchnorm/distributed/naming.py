"""What to call a layer in a message: its path in the model, found when it is needed and not before."""

from __future__ import annotations

import gc
import zlib

from torch import nn


def path_of(layer: nn.Module) -> str:
    """Return the layer's path in the largest model that holds it, or nothing if it stands alone.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    >>> path_of(model[1][0])
    '1.0'

    It looks through every object of the process, so it is for messages only. A wrapper's own ``module`` is left out.
    """
    known = getattr(layer, "_path", "")
    if known:
        return str(known)
    found = ""
    depth = 0
    for thing in gc.get_objects():
        # By type: asking an arbitrary object for its __class__ may run its code.
        if thing is layer or not issubclass(type(thing), nn.Module) or "_modules" not in thing.__dict__:
            continue
        for path, module in thing.named_modules():
            if module is layer and path.count(".") + 1 > depth:
                found, depth = path, path.count(".") + 1
    return found.removeprefix("module.")


def title(layer: nn.Module) -> str:
    """Say which layer it is, in words for a message.

    >>> model = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})
    >>> title(model["norm"])
    "'norm' (BatchNorm1d, 2 channels)"
    """
    path = path_of(layer)
    kind = f"{type(layer).__name__}, {getattr(layer, 'num_features', '?')} channels"
    return f"{path!r} ({kind})" if path else f"a layer ({kind})"


def mark(layer: nn.Module) -> int:
    """Return a number that stands for the path `convert` gave a layer; 0 if it has none.

    >>> mark(nn.BatchNorm1d(2))
    0
    """
    path = getattr(layer, "_path", "")
    return zlib.crc32(path.encode()) or 1 if path else 0
