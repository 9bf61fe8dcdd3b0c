"""Optimisers follow a model into its changed copy: parameter groups and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchnorm.checks import check_model
from batchnorm.errors import BatchNormError
from batchnorm.graph import check_weights
from batchnorm.nested import tensors_in
from batchnorm.optim import Optimizers, is_optimizer, state_of, unwrapped


def check_changeable(model: nn.Module, where: str, *, inplace: bool | None = None) -> None:
    """Raise if a model cannot be changed: if it is scripted, or has scripted parts and would be copied.

    >>> import torch, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(2)))
    >>> check_changeable(scripted, "freeze")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: freeze: the model is scripted, and cannot be changed; give the model that it was \
made from, and script the result
    """
    check_model(model, where)
    if isinstance(model, torch.jit.ScriptModule):
        raise BatchNormError(
            "the model is scripted, and cannot be changed", where=where,
            do="give the model that it was made from, and script the result",
        )  # fmt: skip
    for path, module in model.named_modules():
        # torch copies their parameters as results of a computation: no optimiser takes them.
        if isinstance(module, torch.jit.ScriptModule) and not inplace and any(True for _ in module.parameters()):
            raise BatchNormError(
                f"{path} is scripted, and a copy of it would not learn", where=where,
                do="give the model as it was before torch.jit.script, and script that part of the result"
                + ("" if inplace is None else "; or change it with inplace=True"),
            )  # fmt: skip
    if not inplace:
        check_weights(model, where)


def scripted_norms(model: nn.Module, do: str) -> dict[str, str]:
    """Return the BN layers in scripted parts of a model, which no verb can change, with the reason.

    >>> scripted_norms(nn.Sequential(nn.BatchNorm1d(2)), "freeze it before torch.jit.script")
    {}
    """
    return {
        path: f"it is scripted: {do}"
        for path, module in model.named_modules()
        if "BatchNorm" in str(getattr(module, "original_name", ""))
    }


def check_optimizers(model: nn.Module, optimizer: Optimizers, where: str) -> tuple[Optimizer, ...]:
    """Return one or several optimisers as a tuple. Raises if one is not an optimiser, or was made for another model.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> len(check_optimizers(model, torch.optim.SGD(model.parameters(), lr=0.1), "fuse"))
    1
    """
    check_model(model, where)
    found = as_tuple(optimizer)
    known = {id(p) for p in model.parameters()}
    for each in found:
        if not is_optimizer(each):
            raise BatchNormError(f"optimizer is a {type(each).__name__}", where=where, do="give torch optimisers")
        if not any(id(p) in known for group in each.param_groups for p in group["params"]):
            raise BatchNormError(
                "the optimizer holds no parameter of this model", where=where, do="give the one made for it"
            )
    return found


def follow(optimizers: tuple[Optimizer, ...], old: nn.Module, new: nn.Module) -> None:
    """Move optimisers from a model to its copy, parameter by name, with groups and state.

    >>> import copy, torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> changed = copy.deepcopy(model)
    >>> follow((optimizer,), model, changed)
    >>> optimizer.param_groups[0]["params"][0] is changed.weight
    True
    """
    heirs = dict(nn.Module.named_parameters(new, remove_duplicate=False))
    names = dict(nn.Module.named_parameters(old, remove_duplicate=False))
    to: Mapping[int, nn.Parameter] = {id(p): heirs[name] for name, p in names.items() if name in heirs}
    for name, parameter in names.items():
        if name in heirs and parameter.grad is not None and heirs[name].grad is None:
            heirs[name].grad = parameter.grad.clone()
    carry_over(optimizers, to)


def copy_model(model: nn.Module, optimizer: Optimizers = None) -> nn.Module:
    """Copy a model with its gradients, and move its optimisers to the copy, with groups and state.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> copy_model(model, optimizer).weight is optimizer.param_groups[0]["params"][0]
    True
    """
    copied, memo = copied_with(model)
    carry_over(optimizer, memo)
    return copied


def copied_with(
    model: nn.Module, share: Mapping[int, Any] | None = None, *, where: str = ""
) -> tuple[nn.Module, dict[int, Any]]:
    """Copy a model with its gradients. Returns the copy, and a dictionary from the id of each object to its copy.

    >>> model = nn.Linear(2, 1)
    >>> copied, memo = copied_with(model)
    >>> memo[id(model.weight)] is copied.weight
    True

    ``share`` has, by id, what is not to be copied. ``where`` is the name of a verb that cannot do without a copy.
    """
    memo: dict[int, Any] = dict(share or {})
    for module in model.modules():
        for value in tensors_in(vars(module)):
            # A weight that is recomputed before every run (torch.nn.utils.weight_norm, pruning), or a cache that a
            # forward filled, cannot be copied with what it was computed from; its numbers will do until then.
            if not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        do = "make copy.deepcopy(model) work" if where else "change it with inplace=True"
        raise BatchNormError(f"the model cannot be copied ({error})", where=where, do=do) from error
    for old in model.parameters():
        if old.grad is not None and id(old) in memo:
            memo[id(old)].grad = old.grad.clone()
    return copied, memo


def carry_over(optimizer: Optimizers, moved: Mapping[int, Any]) -> None:
    """Replace parameters of optimisers by id, in their groups and with their state; None removes one.

    >>> import torch
    >>> old, new = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    >>> carry_over(optimizer, {id(old.weight): new.weight, id(old.bias): None})
    >>> [p is new.weight for p in optimizer.param_groups[0]["params"]]
    [True]

    Parameters are exchanged in every list and dictionary of an optimizer and of its wrappers: many keep them in more
    places than their groups and their state (LBFGS, `ZeroRedundancyOptimizer`, Lookahead). A group that loses all its
    parameters stays, for a schedule may count on it. LBFGS forgets its curvature where the number of values changes.
    """
    optimizers = as_tuple(optimizer)
    sizes = list(map(_size, optimizers))
    for held in _containers(optimizers):
        if isinstance(held, list):
            held[:] = _heirs(held, moved)
            continue
        if "param_names" in held:
            named = zip(held["param_names"], held["params"], strict=True)
            held["param_names"] = [name for name, p in named if _heirs([p], moved)]
        kept = {new: _heirs([value], moved) for key, value in held.items() for new in _heirs([key], moved)}
        held.clear()
        held.update((key, value[0] if value else None) for key, value in kept.items())
    for each, size in zip(optimizers, sizes, strict=True):
        _resized(each, size)


DEPTH = 8  # of lists and dictionaries inside each other


class _Several(tuple[Optimizer, ...]):
    """Optimizers without their wrappers, and the objects given for them."""

    given: tuple[Any, ...] = ()


def _containers(optimizers: tuple[Optimizer, ...]) -> list[Any]:
    """Return the lists and dictionaries in optimizers, in their wrappers and in optimizers inside them, each once."""
    found: dict[int, Any] = {}

    def visit(thing: Any, depth: int, whole: bool = False) -> None:
        if depth < 0 or id(thing) in found or isinstance(thing, Tensor):
            return
        if whole or is_optimizer(thing):
            found[id(thing)] = None
            for each in (getattr(thing, "__dict__", None), getattr(thing, "param_groups", None), state_of(thing)):
                visit(each, DEPTH)
        elif isinstance(thing, (list, dict, tuple)):
            found[id(thing)] = None if isinstance(thing, tuple) else thing
            for each in list(thing.values() if isinstance(thing, dict) else thing):
                visit(each, depth - 1)

    given = optimizers.given if isinstance(optimizers, _Several) else ()
    for each in (*given, *optimizers):
        visit(each, DEPTH, whole=True)
    return [each for each in found.values() if each is not None]


def _heirs(things: Iterable[Any], moved: Mapping[int, Any]) -> list[Any]:
    """Return things with parameters exchanged, those in tuples too, and without those that are taken out; what stands
    beside such a parameter in a tuple goes with it."""
    found = []
    for thing in things:
        if type(thing) is tuple:
            inside = tuple(_heirs(thing, moved))
            if len(inside) == len(thing) or all(isinstance(each, Tensor) for each in thing):
                found.append(inside)
        elif not (isinstance(thing, Tensor) and id(thing) in moved):
            found.append(thing)
        elif moved[id(thing)] is not None:
            found.append(moved[id(thing)])
    return found


def restorable(optimizers: tuple[Optimizer, ...]) -> Callable[[], None]:
    """Return a function that puts back what optimizers hold now: groups, states, parameters; not the tensors' numbers.

    >>> import torch
    >>> optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    >>> restore = restorable((optimizer,))
    >>> optimizer.param_groups[0]["params"].clear()
    >>> restore()
    >>> len(optimizer.param_groups[0]["params"])
    2
    """
    before = [(held, copy.copy(held)) for held in _containers(optimizers)]

    def restore() -> None:
        for held, was in before:
            held.clear()
            held.extend(was) if isinstance(held, list) else held.update(was)

    return restore


def _size(optimizer: Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def _resized(optimizer: Optimizer, before: int) -> None:
    """Reset an optimizer that keeps vectors over all its parameters (LBFGS) if their length changed."""
    if hasattr(optimizer, "_numel_cache") and _size(optimizer) != before:
        optimizer._numel_cache = None
        state_of(optimizer).clear()


def join(
    optimizers: tuple[Optimizer, ...],
    beside: Iterable[nn.Parameter],
    new: Iterable[nn.Parameter],
    model: nn.Module,
    *,
    always: bool = False,
) -> None:
    """Give new parameters to the optimiser that holds those of the same layer, in their group.

    >>> import torch
    >>> layer, more = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([{"params": [layer.bias]}, {"params": [layer.weight]}], lr=0.1)
    >>> join((optimizer,), [layer.weight], [more], layer)
    >>> optimizer.param_groups[1]["params"][1] is more
    True

    Beside nothing, they go to the first group of the first; beside what no optimizer holds, to none: the layer was
    chosen not to learn; with ``always``, to the first group, too. An optimizer that knows its parameters by name gets
    the names they have in ``model``.
    """
    own = {id(p) for p in beside}
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    holding = [one for one in groups if any(id(p) in own for p in one[1]["params"])]
    for each, group in (holding or groups if always or not own else holding)[:1]:
        size = _size(each)
        extend(group, new, model)
        _resized(each, size)


def extend(group: dict[str, Any], new: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Add parameters of a model to a group of an optimizer, with their names if it has names.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> (group,) = torch.optim.SGD([("weight", model.weight)], lr=0.1).param_groups
    >>> extend(group, [model.bias], model)
    >>> group["param_names"], group["params"][1] is model.bias
    (['weight', 'bias'], True)
    """
    more = list(new)
    group["params"] += more
    if "param_names" in group:
        names = {id(p): name for name, p in model.named_parameters()}
        group["param_names"] = [*group["param_names"], *(names.get(id(p), "") for p in more)]


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimisers as a tuple, each without its wrappers (see `batchnorm.optim.unwrapped`).

    >>> as_tuple(None)
    ()
    """
    if optimizer is None or isinstance(optimizer, _Several):
        return optimizer or ()
    one = unwrapped(optimizer)
    if is_optimizer(one) or not isinstance(optimizer, Iterable):
        given: tuple[Any, ...] = (optimizer,)
    else:
        given = tuple(optimizer.values() if isinstance(optimizer, Mapping) else optimizer)
    found = _Several({id(each): each for each in map(unwrapped, given)}.values())
    found.given = given
    return found
