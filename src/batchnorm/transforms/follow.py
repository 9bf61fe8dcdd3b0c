"""Optimisers follow a model into its changed copy: parameter groups and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from batchnorm.errors import BatchNormError

Optimizers = Optimizer | Iterable[Optimizer] | None


def several(optimizer: Optimizers, model: nn.Module, where: str) -> tuple[Optimizer, ...]:
    """Return one or several optimisers as a tuple, each of them made for this model.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> len(several(torch.optim.SGD(model.parameters(), lr=0.1), model, "fuse"))
    1
    """
    if optimizer is None:
        return ()
    found = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    known = {id(p) for p in model.parameters()}
    for each in found:
        if not isinstance(each, Optimizer):
            raise BatchNormError(f"optimizer is a {type(each).__name__}", where=where, do="give torch optimisers")
        if not any(id(p) in known for group in each.param_groups for p in group["params"]):
            raise BatchNormError(
                "the optimizer holds no parameter of this model", where=where, do="give the one made for it"
            )
    return found


def follow(optimizers: tuple[Optimizer, ...], old: nn.Module, new: nn.Module) -> None:
    """Let the optimisers go over from a model to its copy, parameter by name, with groups and state.

    >>> import copy, torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> changed = copy.deepcopy(model)
    >>> follow((optimizer,), model, changed)
    >>> optimizer.param_groups[0]["params"][0] is changed.weight
    True
    """
    heirs = dict(new.named_parameters(remove_duplicate=False))
    names = dict(old.named_parameters(remove_duplicate=False))
    to: Mapping[int, nn.Parameter] = {id(p): heirs[name] for name, p in names.items() if name in heirs}
    for name, parameter in names.items():
        if name in heirs and parameter.grad is not None and heirs[name].grad is None:
            heirs[name].grad = parameter.grad.clone()
    for each in optimizers:
        for group in each.param_groups:
            group["params"] = [to.get(id(p), p) for p in group["params"]]
        moved = [(to.get(id(p), p), state) for p, state in each.state.items()]
        each.state.clear()
        each.state.update(moved)
