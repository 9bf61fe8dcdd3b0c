"""Optimizers: parameter groups in which only weights decay, and the torch optimizer inside a wrapper."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from batchnorm.checks import check_model
from batchnorm.errors import BatchNormError
from batchnorm.layers.channel_norms import PerChannel
from batchnorm.layers.foreign import keeps_statistics

NoDecay = str | Iterable[str] | Callable[[str, nn.Parameter], bool]

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, PerChannel)
_NORM_NAME = re.compile(r"Norm(\dd|Nd)?$")  # LlamaRMSNorm, LayerNorm2d; not NormLinear, whose weight is a weight
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|$)")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
DEPTH = 16  # wrappers around an optimizer


def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    no_decay: NoDecay = (),
    decay_embeddings: bool = True,
    keep_frozen: bool = False,
    **defaults: Any,
) -> list[dict[str, Any]]:
    """Return two parameter groups, "decay" and "no_decay", for any optimiser of torch.

    >>> import torch, batchnorm as bn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), bn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(10))
    >>> y = model(torch.randn(4, 3, 8, 8))
    >>> groups = param_groups(model, weight_decay=1e-4, lr=0.1)
    >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in groups]
    [('decay', 2, 0.0001), ('no_decay', 4, 0.0)]
    >>> optimizer = torch.optim.SGD(groups, lr=0.1)

    **Decayed** are parameters of two axes and more. **Not decayed** are all of one axis and none (gamma, beta,
    biases, DyT's alpha, FRN's tau and eps); every parameter of a normalisation layer whatever its axes
    (``LayerNorm((C, H, W))``), that is of torch's, of ours, and of a class whose name ends in ``Norm``, ``Norm2d`` or
    the like; and whatever has "bias" as a word of its name. Decay pulls toward zero: for a weight that is simplicity,
    for a gamma it is a channel that fades, for a beta an activation that dies.

    **Weight normalisation**, ``w = g * v / |v|``: g is a gain, so it is not decayed, as gamma is not. v is decayed, as
    a weight in front of batch norm is: the function does not depend on its length, but the step does, since the
    gradient is as 1 / |v|. Without decay |v| only grows, and the learning rate fades with it; with decay it settles.
    For the fading, say ``no_decay="*.original1"``.

    - ``no_decay``: more to leave alone: names of parameters or modules, patterns with ``*``, or a function of
      ``(name, parameter)``. A name that fits nothing raises, since it is a mistake or a model that has changed.
    - ``decay_embeddings=False`` leaves the weights of ``nn.Embedding`` alone: a row that a batch does not use has no
      gradient, and decay would take it down all the same.
    - ``keep_frozen=False`` skips what has ``requires_grad`` off, so that nothing but what learns is in the
      optimiser; with True it is put into its group, for a model that will be thawed while it trains.
    - ``defaults`` (``lr``, ``betas``, ...) go into both groups.

    A parameter that is used in several places is listed once, and not decayed if any of them says so. Both groups are
    always there, though one may be empty, so that schedules and checkpoints can count on their order.
    """
    where = "param_groups"
    check_model(model, where)
    if weight_decay < 0:
        raise BatchNormError(f"weight_decay is {weight_decay}", where=where, do="use 0 or a positive number")
    excluded = _Excluded(no_decay)
    spared: dict[nn.Parameter, bool] = {}  # insertion order is the model's
    for name, parameter, owner, tensor in _places(model):
        if is_lazy(parameter):
            raise BatchNormError(
                f"{name} has no shape yet", where=where, do="run one batch through the model before this call"
            )
        spare = (
            excluded.fits(name, parameter)  # first, so that it sees every name
            or _spared(parameter, owner, tensor)
            or (not decay_embeddings and isinstance(owner, _EMBEDDINGS))
        )
        if parameter.requires_grad or keep_frozen:
            spared[parameter] = spared.get(parameter, False) or spare
    excluded.check()
    if not spared:
        frozen = any(True for _ in model.parameters())
        raise BatchNormError(
            f"{type(model).__name__} has no parameter that learns",
            where=where,
            do="turn requires_grad on, or pass keep_frozen=True" if frozen else "give a model that has parameters",
        )
    return [
        {"params": [p for p, s in spared.items() if s == spare], "weight_decay": decay, "name": name, **defaults}
        for name, spare, decay in (("decay", False, float(weight_decay)), ("no_decay", True, 0.0))
    ]


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module, str]]:
    """Yield each place of each parameter: its name, itself, the layer it belongs to, and its name within that."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        path, _, tensor = name.rpartition(".")
        owner = modules[path]
        if isinstance(owner, ParametrizationList):
            # conv.parametrizations.weight.original0 is of the layer conv, and stands for its weight.
            above, _, attribute = path.rpartition(".")
            if isinstance(owner[0], _WeightNorm):
                tensor = "weight_g" if tensor == "original0" else "weight_v"
            else:
                tensor = attribute
            owner = modules[above.rpartition(".")[0]]
        elif tensor.endswith("_g") and f"{tensor[:-2]}_v" in owner._parameters:
            tensor = "weight_g"  # torch's older weight norm has them on the layer itself
        yield name, parameter, owner, tensor


def _spared(parameter: Tensor, owner: nn.Module, tensor: str) -> bool:
    return (
        parameter.ndim < 2
        or isinstance(owner, _NORMS)
        or (keeps_statistics(owner) and parameter.numel() == max(parameter.shape))  # a gamma of shape (1, C, 1, 1)
        or _NORM_NAME.search(type(owner).__name__) is not None
        or _BIAS_NAME.search(tensor) is not None
        or tensor == "weight_g"
    )


class _Excluded:
    """The user's own exceptions, and which of them were of use."""

    def __init__(self, no_decay: NoDecay) -> None:
        self.predicate = no_decay if callable(no_decay) else None
        names = () if callable(no_decay) else (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
        self.used = dict.fromkeys(names, False)

    def fits(self, name: str, parameter: nn.Parameter) -> bool:
        if self.predicate is not None:
            return bool(self.predicate(name, parameter))
        fitting = [p for p in self.used if name == p or name.startswith(f"{p}.") or fnmatchcase(name, p)]
        self.used.update(dict.fromkeys(fitting, True))
        return bool(fitting)

    def check(self) -> None:
        useless = [pattern for pattern, used in self.used.items() if not used]
        if useless:
            raise BatchNormError(
                f"no_decay names {', '.join(map(repr, useless))}, which no parameter of the model fits",
                where="param_groups",
                do="see model.named_parameters() for the names",
            )


class Wrapper(Protocol):
    """An object around an optimizer, as accelerate, Lightning, DeepSpeed and many training programs make."""

    @property
    def optimizer(self) -> Any:
        """What it wraps."""


Optimizers = Optimizer | Wrapper | Iterable[Optimizer | Wrapper] | Mapping[str, Optimizer | Wrapper] | None


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside any number of wrappers; an argument that contains no optimizer is returned as it is.

    >>> import torch
    >>> class WarmUp:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> unwrapped(WarmUp(WarmUp(sgd))) is sgd, unwrapped(sgd) is sgd, unwrapped("sgd")
    (True, True, 'sgd')

    A wrapper is anything with an attribute ``optimizer`` that leads to an object with ``param_groups``; or, under any
    other name, one attribute that does so and holds at least the wrapper's own parameters (Lookahead, SAM). The step
    hooks and the state of a wrapper are often not those of the optimizer that updates the parameters, even where the
    wrapper is a subclass of `torch.optim.Optimizer`, as accelerate's is.
    """
    found = _innermost(optimizer, ())
    return optimizer if found is None else found


def is_optimizer(given: Any) -> bool:
    """Whether an object has parameter groups, as every optimizer of torch has.

    >>> import torch
    >>> is_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1)), is_optimizer(torch.optim.SGD), is_optimizer(None)
    (True, False, False)
    """
    groups = getattr(given, "param_groups", None)
    return isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def state_of(optimizer: Any) -> dict[Any, Any]:
    """Return what an optimizer keeps for each parameter; nothing for one that is no torch optimizer and keeps none.

    >>> import torch
    >>> state_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    defaultdict(<class 'dict'>, {})
    """
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def hook_steps(optimizer: Any, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call two functions with the optimizer before and after each of its steps; return a function that stops that.

    >>> import torch
    >>> sgd, steps = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    >>> remove = hook_steps(sgd, lambda *_: steps.append("before"), lambda *_: steps.append("after"))
    >>> sgd.step()
    >>> remove()
    >>> sgd.step()
    >>> steps
    ['before', 'after']

    An optimizer whose ``step`` does not run torch's hooks (any class of its own with ``param_groups``) has its ``step``
    replaced on the instance for that time.
    """
    if _runs_hooks(optimizer):
        handles = ExitStack()
        handles.callback(optimizer.register_step_pre_hook(before).remove)
        handles.callback(optimizer.register_step_post_hook(after).remove)
        return handles.close
    step, own, active = optimizer.step, "step" in vars(optimizer), True

    @functools.wraps(step)
    def stepping(*arguments: Any, **keywords: Any) -> Any:
        if not active:
            return step(*arguments, **keywords)
        before(optimizer)
        result = step(*arguments, **keywords)
        after(optimizer)
        return result

    def remove() -> None:
        nonlocal active
        active = False
        if vars(optimizer).get("step") is stepping:  # else another function has been put around it since
            if own:
                optimizer.step = step
            else:
                del optimizer.step

    optimizer.step = stepping
    return remove


def _innermost(given: Any, above: tuple[Any, ...]) -> Any:
    if len(above) > DEPTH or any(given is each for each in above):
        return None
    above = (*above, given)
    found = _innermost(named, above) if (named := getattr(given, "optimizer", None)) is not None else None
    if found is not None:
        return found
    wraps = is_optimizer(given)
    inside = [value for value in getattr(given, "__dict__", {}).values() if is_optimizer(value)]
    distinct = {id(each): each for value in inside if (each := _innermost(value, above)) is not None}
    if len(distinct) == 1:
        (found,) = distinct.values()
        if not wraps or _held(given) <= _held(found):
            return found
    return given if wraps else None


def _held(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _runs_hooks(optimizer: Any) -> bool:
    """Whether an optimizer is one whose constructor made torch run its step hooks."""
    patched = getattr(type(optimizer).step, "hooked", False)
    return isinstance(optimizer, Optimizer) and bool(patched) and hasattr(optimizer, "_optimizer_step_pre_hooks")
