"""Which optimiser's steps count for a layer, where a model has several optimisers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def owners(model: nn.Module, paths: Iterable[str], optimizers: list[Optimizer]) -> dict[Optimizer, list[str]]:
    """The layers of each optimiser that holds parameters of the model.

    >>> import torch
    >>> model = nn.ModuleDict({"G": nn.BatchNorm1d(2), "D": nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))})
    >>> first, second = (torch.optim.SGD(model[name].parameters(), lr=1) for name in "GD")
    >>> owners(model, ["G", "D.1"], [first, second])[second]
    ['D.1']

    A layer's optimisers are those that hold its gamma or beta; if it has none, those that hold parameters of the module
    it is in, or of the one that is in.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    holds: dict[Optimizer, set[str]] = {}
    for optimizer in optimizers:
        held = [n for group in optimizer.param_groups for p in group["params"] for n in names.get(id(p), ())]
        if held:
            holds[optimizer] = {prefix for name in held for prefix in _prefixes(name)}
    found: dict[Optimizer, list[str]] = {optimizer: [] for optimizer in holds}
    for path in paths:
        for prefix in (path, *_prefixes(path)):
            own = [optimizer for optimizer, prefixes in holds.items() if prefix in prefixes]
            if own:
                for optimizer in own:
                    found[optimizer].append(path)
                break
    return found


def _prefixes(name: str) -> list[str]:
    """The modules that something is in, the innermost first.

    >>> _prefixes("a.b.weight")
    ['a.b', 'a', '']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
