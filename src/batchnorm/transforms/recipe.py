"""``recipe``: the other changes of section 4.2.1 of the paper, with which a network with BN trains faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer, lr_scheduler

from batchnorm.errors import BatchNormError
from batchnorm.optim import Optimizers, is_optimizer, unwrapped
from batchnorm.records import Change
from batchnorm.transforms.follow import as_tuple

_HERE = "recipe"


def recipe(
    optimizer: Optimizers,
    factor: float = 5,
    model: nn.Module | None = None,
    *,
    scheduler: Any = None,
    weight_decay: float = 5,
    faster: float = 6,
) -> list[Change]:
    """Change an optimiser, a schedule and a model as section 4.2.1 did for networks with BN; return what changed.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.4), nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    >>> scheduler = lr_scheduler.StepLR(optimizer, step_size=30)
    >>> for change in recipe(optimizer, 5, model, scheduler=scheduler):
    ...     print(change)
    optimizer group 0: lr 0.1 -> 0.5
    optimizer group 0: weight_decay 0.001 -> 0.0002
    scheduler: step_size 30 -> 5
    3: dropout 0.4 -> None

    The learning rate is multiplied by ``factor`` (5 in BN-x5, the run behind the paper's factor of 14, and 30 in
    BN-x30), weight decay divided by ``weight_decay``, the schedule is ``faster`` times as fast, and the dropout modules
    of the model are taken out. All of it happens in place, before the first step; a factor of 1 leaves a thing as it
    is. Settings that turn out as they were are not listed.

    The paper's other changes are for the data: no local response normalisation, better shuffling, less distortion. What
    it cannot reach is dropout that a forward calls as a function. Where weight decay is decoupled from the gradient
    (AdamW), a step decays by the product of the two, which stays the same.
    """
    optimizers = as_tuple(optimizer)
    _check(optimizers, factor, weight_decay, faster)
    change_schedule = _schedule(scheduler, optimizers, faster)  # may refuse, so before anything changes
    changes: list[Change] = []
    for number, each in enumerate(optimizers):
        for at, group in enumerate(each.param_groups):
            name = f"optimizer{f' {number}' if len(optimizers) > 1 else ''} group {at}"
            changes += _scale(name, group, factor, weight_decay)
    changes += change_schedule(factor)
    if model is not None:
        changes += _without_dropout(model)
    return [change for change in changes if change.before != change.after]


def _scale(name: str, group: dict[str, Any], factor: float, weight_decay: float) -> list[Change]:
    changes = []
    for setting, by in (("lr", factor), ("weight_decay", 1 / weight_decay)):
        if setting not in group:
            continue
        old = group[setting]
        before = float(old)
        if isinstance(old, Tensor):  # of an optimiser that is captured: the tensor has to stay
            old.mul_(by)
        else:
            group[setting] = _short(old * by)
        changes.append(Change(name, setting, _short(before), _short(float(group[setting]))))
    if "initial_lr" in group:  # what schedules begin with
        group["initial_lr"] = group["initial_lr"] * factor
    return changes


def _schedule(scheduler: Any, optimizers: tuple[Optimizer, ...], faster: float) -> Callable[[float], list[Change]]:
    """The function that makes a schedule faster, and begin with the new learning rate; or an error."""
    if scheduler is None:
        return lambda factor: []
    while not isinstance(scheduler, lr_scheduler.LRScheduler) and hasattr(scheduler, "scheduler"):  # as accelerate's
        scheduler = scheduler.scheduler
    own = unwrapped(getattr(scheduler, "optimizer", None))
    if not any(own is each for each in optimizers):
        raise BatchNormError(
            "the scheduler belongs to another optimizer", where=_HERE, do="give the optimizer it was made with"
        )
    sooner = _SOONER.get(type(scheduler))
    if sooner is None:
        known = ", ".join(kind.__name__ for kind in _SOONER)
        raise BatchNormError(
            f"how to make a {type(scheduler).__name__} faster is not known (known: {known})",
            where=_HERE,
            do="make a new scheduler after recipe(), with its times divided",
        )

    def change(factor: float) -> list[Change]:
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
        if hasattr(scheduler, "_last_lr"):
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        changes = []
        for name, new in sooner(scheduler, faster).items():
            old = getattr(scheduler, name)
            setattr(scheduler, name, new)
            shown = (old, new)
            if isinstance(old, Counter):
                shown = (sorted(old.elements()), sorted(new.elements()))
            elif name == "lr_lambdas":
                shown = ("of the step", f"of {faster:g} times the step")
            changes.append(Change("scheduler", name, *shown))
        return changes

    return change


def _whole(steps: float) -> int:
    return max(1, round(steps))


_SOONER: dict[type, Callable[[Any, float], dict[str, Any]]] = {
    lr_scheduler.StepLR: lambda s, k: {"step_size": _whole(s.step_size / k)},
    lr_scheduler.MultiStepLR: lambda s, k: {"milestones": Counter(_whole(at / k) for at in s.milestones.elements())},
    lr_scheduler.ExponentialLR: lambda s, k: {"gamma": _short(s.gamma**k)},
    lr_scheduler.CosineAnnealingLR: lambda s, k: {"T_max": _whole(s.T_max / k)},
    lr_scheduler.LinearLR: lambda s, k: {"total_iters": _whole(s.total_iters / k)},
    lr_scheduler.PolynomialLR: lambda s, k: {"total_iters": _whole(s.total_iters / k)},
    lr_scheduler.LambdaLR: lambda s, k: {"lr_lambdas": [_Sooner(f, k) for f in s.lr_lambdas]},
}


class _Sooner:
    """A function of the step that is ``faster`` times ahead."""

    def __init__(self, function: Callable[[float], float], faster: float) -> None:
        self.function, self.faster = function, faster

    def __call__(self, step: float) -> float:
        ahead = step * self.faster
        return self.function(int(ahead) if float(ahead).is_integer() else ahead)


def _without_dropout(model: nn.Module) -> list[Change]:
    changes = []
    for path, module in list(model.named_modules()):
        if isinstance(module, _DropoutNd):
            changes.append(Change(path, "dropout", module.p, None))
            module.p = 0.0  # for whoever holds it elsewhere, and for a model that is nothing but dropout
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout:
            changes.append(Change(path, "dropout", module.dropout, None))
            module.dropout = 0.0
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, _DropoutNd):
                module._modules[name] = nn.Identity().train(child.training)
    return changes


def _short(value: float) -> float:
    """Without what rounding leaves behind: 0.1 * 3 is 0.3."""
    return float(f"{value:.12g}")


def _check(optimizers: tuple[Any, ...], factor: float, weight_decay: float, faster: float) -> None:
    for each in optimizers or (None,):
        if not is_optimizer(each):
            raise BatchNormError(f"optimizer is a {type(each).__name__}", where=_HERE, do="give torch optimisers")
    for name, value in (("factor", factor), ("weight_decay", weight_decay), ("faster", faster)):
        if not value > 0:
            raise BatchNormError(f"{name} is {value!r}", where=_HERE, do="use a positive number")
