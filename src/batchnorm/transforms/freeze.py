"""``freeze`` and ``unfreeze``: make the BN layers of a model constant, whatever ``train()`` sets, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import OURS, BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNormBase
from batchnorm.layers.foreign import Evaluating, evaluating, is_foreign, keeps_statistics, statistics_of
from batchnorm.layers.frozen import FrozenBatchNorm
from batchnorm.optim import Optimizers
from batchnorm.records import Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import (
    carry_over,
    check_changeable,
    check_optimizers,
    copied_with,
    scripted_norms,
)
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.synchronise import alike, prepared, trial_shapes

Modules = Iterable["str | nn.Module"] | str | nn.Module | None

# A torch layer keeps its object, and with it its hooks, its users and its parameters, and gets another class: ours
# has the switches that train() does not touch. The memory of what it was is an attribute of the layer, so that it is
# copied, pickled and saved with it.
_OURS: dict[type[nn.Module], type[_BatchNormBase]] = {
    **OURS,
    nn.SyncBatchNorm: FrozenBatchNorm,  # which takes any dimensions too, and has nothing to synchronise
}
_BY_DIMENSIONS: dict[int, type[_BatchNormBase]] = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}
_MEMORY = "_before_freeze"
_BLIND = "it has no running statistics to normalise with"
_ALREADY = "frozen already"
OWN_FORWARD = "has a forward of its own"  # the reason of verbs that do not know what a class computes
_SCRIPTED = "freeze it before torch.jit.script"


def freeze(
    model: nn.Module, modules: Modules = None, *, optimizer: Optimizers = None, inplace: bool = False
) -> tuple[nn.Module, Report]:
    """Return a copy of the model whose BN layers are constant, and a report of what changed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))
    >>> frozen, report = freeze(model)
    >>> print(report)
    1 module changed
      1: class torch.nn.BatchNorm2d -> batchnorm.BatchNorm2d, statistics auto -> running, update None -> False, \
learn True -> False
    1 left alone
      2: a GroupNorm is not a batch norm layer
    >>> import torch
    >>> y = frozen.train()(torch.randn(4, 3, 8, 8))
    >>> int(frozen[1].num_batches_tracked), frozen[1].weight.requires_grad
    (0, False)

    A frozen layer normalises with its running statistics, updates nothing, and its gamma and beta do not learn, also
    after ``train()``. Every layer that keeps running statistics is frozen, of any library: torch's own BN layers become
    ours, which have the switches for this; a layer of another class becomes a subclass of its class whose forward runs
    as in evaluation, while the dropout and the activation inside it work as before. `unfreeze` restores the old layers,
    and names in the ``state_dict`` stay. Layers without running statistics are left alone, with the reason in the
    report. If a layer keeps statistics and cannot be frozen, it raises, and nothing is changed.

    ``modules``: names of layers or of what contains them, or the modules themselves; None is the whole model.
    ``optimizer``: one or several, made for ``model``; they follow to the copy with their groups and state. Gradients
    of gamma and beta that are left over are dropped, so that momentum and weight decay do not move them
    either: torch's optimisers skip a parameter that has no gradient.
    ``inplace``: change the model itself, and return it with the report.
    """
    target, chosen, follow = _begin(model, modules, optimizer, inplace, "freeze")
    left: dict[str, str] = {}
    stuck = {path: why for path, why in scripted_norms(target, _SCRIPTED).items() if _covers(chosen, path)}
    layers: list[tuple[str, nn.Module]] = []
    untried: list[nn.Module] = []
    for path, module, first in _named(target, chosen):
        reason = f"the same layer as {first!r}" if first is not None else _why_not(module)
        if reason and first is None and (moving := _moves_in_training(module)):
            stuck[path] = f"{type(module).__name__}: a batch moves its {moving}, which no name shows to be statistics"
        elif reason:
            left[path] = reason
        elif why := _unfit(module, untried):
            stuck[path] = f"{type(module).__name__}: {why}"
        else:
            layers.append((path, module))
    if stuck:
        raise _none(stuck, "cannot be frozen", "freeze the others with modules=, or each of these in its own way")
    if not layers and any(why == _BLIND for why in left.values()) and _ALREADY not in left.values():
        blind = {path: why for path, why in left.items() if why == _BLIND}
        raise _none(blind, "cannot be frozen", "give a model with running statistics (track_running_stats=True)")
    # Look at all of them before any changes: layers may share a gamma.
    memories = [_remember(layer) for _, layer in layers]
    changes: list[Change] = []
    for (path, layer), memory in zip(layers, memories, strict=True):
        vars(layer)[_MEMORY] = memory
        changes += _freeze(path, layer, memory)
    for layer in untried:  # every call checks that its statistics stay
        vars(layer)["_checked"] = True
    follow()
    left_behind(model, target, "freeze", inplace=True)
    return Changed((target, Report(tuple(changes), left)))


def unfreeze(
    model: nn.Module,
    modules: Modules = None,
    *,
    optimizer: Optimizers = None,
    dimensions: int | None = None,
    inplace: bool = False,
) -> tuple[nn.Module, Report]:
    """Return a copy of the model in which `freeze` is undone, and a report.

    >>> frozen, _ = freeze(nn.Sequential(nn.BatchNorm2d(8)))
    >>> thawed, report = unfreeze(frozen)
    >>> type(thawed[0]) is nn.BatchNorm2d, thawed[0].weight.requires_grad
    (True, True)

    Class and switches become what they were. A layer that was built as a `FrozenBatchNorm` becomes a BatchNorm1d, 2d
    or 3d after the input it saw last; one that saw none needs ``dimensions``, those of an input (4 for images). Its
    gamma and beta become new parameters, which the report names: give them to an optimizer. A layer that was frozen in
    another way (by its switches, or a frozen class of another library) is left alone, and if nothing else is frozen
    that raises.
    """
    if dimensions is not None and dimensions not in _BY_DIMENSIONS:
        raise BatchNormError(f"dimensions is {dimensions!r}", where="unfreeze", do="use those of an input: 2 to 5")
    # Whatever cannot be done ends before anything is copied or changed.
    check_changeable(model, "unfreeze", inplace=inplace)
    for path, module, first in _named(model, _choose(model, modules, "unfreeze")):
        if type(module) is FrozenBatchNorm and first is None and not hasattr(module, _MEMORY):
            _class_of(module, dimensions, path)
    target, chosen, follow = _begin(model, modules, optimizer, inplace, "unfreeze")
    changes: list[Change] = []
    left: dict[str, str] = {}
    otherwise: dict[str, str] = {}
    for path, module, first in _named(target, chosen):
        if first is not None:
            left[path] = f"the same layer as {first!r}"
        elif hasattr(module, _MEMORY):
            changes += _restore(path, module)
        elif type(module) is FrozenBatchNorm:
            changes += _thaw(path, module, dimensions)
        elif is_constant(module):
            otherwise[path] = f"a {type(module).__name__} was built with constants, not frozen by freeze: replace it"
        elif is_frozen(module):
            otherwise[path] = "frozen by its switches, not by freeze: set them"
        elif isinstance(module, _BatchNorm) or keeps_statistics(module):
            left[path] = "not frozen"
    if otherwise and not changes:
        raise BatchNormError(f"nothing was unfrozen ({few_of(otherwise)})", where="unfreeze", do="see each reason")
    follow()
    left_behind(model, target, "unfreeze", inplace=True)
    return Changed((target, Report(tuple(changes), left | otherwise)))


def is_frozen(layer: nn.Module) -> bool:
    """Whether the statistics of a layer are fixed, in training too: by its switches, by `freeze`, or by its class.

    >>> is_frozen(FrozenBatchNorm(3)), is_frozen(BatchNorm1d(3).eval())
    (True, False)
    """
    if isinstance(layer, Evaluating) or is_constant(layer):
        return True
    return isinstance(layer, _BatchNormBase) and layer.statistics == "running" and layer.update is False


def _begin(
    model: nn.Module, modules: Modules, optimizer: Optimizers, inplace: bool, where: str
) -> tuple[nn.Module, tuple[str, ...] | None, Callable[[], None]]:
    """Check the arguments; return what may be changed, the chosen paths, and what lets the optimizers follow."""
    check_changeable(model, where, inplace=inplace)
    chosen = _choose(model, modules, where)
    optimizers = check_optimizers(model, optimizer, where)
    if inplace:
        return model, chosen, lambda: None
    target, moved = copied_with(model)
    return target, chosen, lambda: carry_over(optimizers, moved)


def _choose(model: nn.Module, modules: Modules, where: str) -> tuple[str, ...] | None:
    """Return the paths of the modules that the caller named, which are valid for a copy too; None is all."""
    if modules is None:
        return None
    given = [modules] if isinstance(modules, (str, nn.Module)) else list(modules)
    paths = dict(model.named_modules(remove_duplicate=False))
    chosen: list[str] = []
    for one in given:
        found = [path for path, module in paths.items() if (path == one if isinstance(one, str) else module is one)]
        if not found:
            name = repr(one) if isinstance(one, str) else f"this {type(one).__name__}"
            raise BatchNormError(
                f"the model has no module {name}", where=where, do="use a name of model.named_modules()"
            )
        chosen += found
    return tuple(chosen)


def _covers(chosen: tuple[str, ...] | None, path: str) -> bool:
    return chosen is None or any(path == c or not c or path.startswith(c + ".") for c in chosen)


def _named(model: nn.Module, chosen: tuple[str, ...] | None) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield the normalising modules chosen: path, module, and, of one met before, the path where it was met."""
    met: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule) or not _covers(chosen, path):
            continue
        leaf = not any(child is not None for child in module._modules.values())
        if (
            isinstance(module, _BatchNorm)
            or keeps_statistics(module)
            or (leaf and "norm" in type(module).__name__.lower())
        ):
            yield path, module, met.get(module)
            met.setdefault(module, path)


def _why_not(module: nn.Module) -> str:
    """Return why a layer has nothing to freeze; empty if it has."""
    if hasattr(module, _MEMORY) or is_constant(module):
        return _ALREADY
    if keeps_statistics(module) or (isinstance(module, _LazyNormBase) and is_lazy(module._buffers.get("running_mean"))):  # type: ignore[arg-type]
        return ""
    name = type(module).__name__
    if isinstance(module, _BatchNorm):
        return _BLIND
    return f"{'an' if name[0] in 'AEIOR' else 'a'} {name} is not a batch norm layer"


def cannot_freeze(layer: nn.Module) -> str:
    """Return why `freeze` would leave a layer alone or refuse it; empty if it can freeze it.

    >>> cannot_freeze(nn.BatchNorm1d(2)), cannot_freeze(nn.BatchNorm1d(2, track_running_stats=False))
    ('', 'it has no running statistics to normalise with')
    """
    return _why_not(layer) or _unfit(layer, [])


def is_constant(module: nn.Module) -> bool:
    """Whether a layer was built with constants: the frozen classes of torchvision, timm, detectors, and ours.

    >>> is_constant(FrozenBatchNorm(2)), is_constant(nn.BatchNorm1d(2))
    (True, False)
    """
    if type(module) is FrozenBatchNorm:
        return True
    own = module._buffers
    built = "frozen" in type(module).__name__.lower() and not isinstance(module, (_NormBase, Evaluating))
    return built and "weight" in own and "bias" in own and keeps_statistics(module)


def _unfit(layer: nn.Module, untried: list[nn.Module]) -> str:
    """Return why a layer with statistics cannot be frozen; empty if it can. A layer that cannot be tried is noted."""
    if any(is_lazy(t) for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None):
        return "not initialised yet: run the model once first"
    if "forward" in vars(layer):
        return "its forward was replaced on the object, and no class reaches it"
    if _has_switches(layer):
        return ""
    found = _tried(layer)
    if found is None:
        untried.append(layer)
    return found or ""


def _has_switches(layer: nn.Module) -> bool:
    """Whether our switches alone freeze a layer: one of ours, or of exactly torch's class."""
    return type(layer) in _OURS or (isinstance(layer, _BatchNormBase) and not is_foreign(layer))


def _tried(layer: nn.Module) -> str | None:
    """Try a layer of another class as it would be frozen, on a small batch in float64; say what goes wrong.

    None if it cannot be called so.
    """
    kept = next(t for t in statistics_of(layer).values() if t.dim())
    channels = next((size for size in reversed(kept.shape) if size > 1), 1)  # also of shape (1, C, 1, 1)
    shapes = trial_shapes(layer) if isinstance(layer, _BatchNorm) else ((3, 3), (3,), (2, 2, 2), ())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for shape in shapes:
            try:
                was, twin = prepared(layer), prepared(layer)
                _switch_off(twin)
                x = torch.randn(8, channels, *shape, dtype=torch.float64, device=kept.device)
                expected = was.eval()(x.clone())
                before = [t.clone() for t in statistics_of(twin).values()]
                same = alike(twin(x.clone()), expected)
                with torch.enable_grad():  # some look at this, not at their mode
                    same = same and alike(twin(x.clone()).detach(), expected)
            except BatchNormError as error:
                return error.problem
            except Exception:  # it wants other arguments
                continue
            if not all(torch.equal(a, b) for a, b in zip(before, statistics_of(twin).values(), strict=True)):
                return "its statistics move in evaluation, too"
            return "" if same else "in evaluation it does something else than its class"
    return None


def _moves_in_training(layer: nn.Module) -> str:
    """Return the names of the buffers of a foreign norm that a batch moves in training, as far as a trial shows."""
    if not is_foreign(layer) or is_frozen(layer) or not any(t.is_floating_point() for t in layer.buffers()):
        return ""
    channels = next((t.shape[-1] for t in layer.buffers() if t.dim() == 1), 1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for shape in ((3, 3), (3,), ()):
            try:
                twin = prepared(layer)
                before = {name: t.clone() for name, t in twin.named_buffers()}
                twin(torch.randn(8, channels, *shape, dtype=torch.float64))
            except Exception:  # it wants other arguments
                continue
            return " and ".join(name for name, t in twin.named_buffers() if not torch.equal(t, before[name]))
    return ""


def _none(reasons: dict[str, str], what: str, do: str) -> BatchNormError:
    number = f"{len(reasons)} layer{'s' * (len(reasons) != 1)} that normalise{'s' * (len(reasons) == 1)}"
    return BatchNormError(f"{number} {what} ({few_of(reasons)})", where="freeze", do=do)


def check_reached(
    verb: str, changes: Iterable[Change], left: Mapping[str, str], model: nn.Module, because: str = ""
) -> None:
    """Raise if a verb changed nothing, and norms of classes that it does not know are a reason.

    >>> class Own(nn.BatchNorm1d):
    ...     __module__ = "mine"
    ...     def forward(self, x):
    ...         return super().forward(x) * 2
    >>> check_reached("fuse", (), {"0": "it is frozen"}, nn.Sequential(Own(2)))
    >>> check_reached("fuse", (), {"0": "its class Own is not torch's"}, nn.Sequential(Own(2)))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse: nothing could be changed (0: its class Own is not torch's); replace these \
layers by torch's or ours

    What is so already ("it is ...") is no such reason; ``because`` is what a reason has to contain.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = {
        path: why for path, why in left.items()
        if path in modules and because in why and not why.startswith("it is ")
        and (is_foreign(modules[path]) if isinstance(modules[path], _BatchNorm) else keeps_statistics(modules[path]))
    }  # fmt: skip
    if unknown and not any(True for _ in changes):
        do = "replace these layers by torch's or ours"
        raise BatchNormError(f"nothing could be changed ({few_of(unknown)})", where=verb, do=do)


def few_of(reasons: Mapping[str, str], most: int = 4) -> str:
    """Join some of the reasons, each once with the first path that has it, and say how many more there are.

    >>> few_of({"a": "lazy", "b": "lazy", "": "scripted"}), few_of({"a": "lazy", "b": "scripted"}, most=1)
    ('a and 1 more: lazy; the model: scripted', 'a: lazy; and 1 more')
    """
    paths: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        paths.setdefault(reason, []).append(path or "the model")
    shown = [
        f"{own[0]}{f' and {len(own) - 1} more' if own[1:] else ''}: {reason}"
        for reason, own in [*paths.items()][:most]
    ]  # fmt: skip
    more = sum(len(own) for own in [*paths.values()][most:])
    return "; ".join(shown + [f"and {more} more"] * bool(more))


def _learned(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return gamma, beta and what else the normalisation itself learns, or is computed from, by name."""
    found = {name: p for name in ("weight", "bias") if isinstance(p := getattr(layer, name, None), nn.Parameter)}
    channels = next((t.numel() for t in statistics_of(layer).values() if t.dim()), 0)
    found |= {name: p for name, p in layer._parameters.items() if p is not None and p.numel() == channels}
    if is_parametrized(layer):
        found |= {name: p for name, p in layer.named_parameters() if name.startswith("parametrizations.")}
    return found


def _remember(layer: nn.Module) -> dict[str, Any]:
    switches = {} if not _has_switches(layer) and not isinstance(layer, _BatchNormBase) else {
        name: getattr(layer, name, getattr(_BatchNormBase, name)) for name in ("statistics", "update")
    }  # fmt: skip
    learning = {name: p.requires_grad for name, p in _learned(layer).items()}
    before = type(layer) if type(layer) in _OURS else None
    absent = [name for name in switches if name not in vars(layer)]
    return {"class": before, "switches": switches, "absent": absent, "learning": learning}


def _switch_off(layer: nn.Module) -> None:
    """Let a layer use its running statistics, and update nothing."""
    if not _has_switches(layer):
        layer.__class__ = evaluating(type(layer))
    elif type(layer) in _OURS:
        layer.__class__ = _OURS[type(layer)]
    if isinstance(layer, _BatchNormBase):
        layer.statistics, layer.update = "running", False


def _freeze(path: str, layer: nn.Module, memory: dict[str, Any]) -> Iterator[Change]:
    old = type(layer)
    _switch_off(layer)
    if old in _OURS:
        yield Change(path, "class", _name(old), _name(type(layer)))
    for name, value in (("statistics", "running"), ("update", False)):
        before = memory["switches"].get(name, getattr(_BatchNormBase, name))
        if before != value:
            yield Change(path, name, before, value)
    if any(memory["learning"].values()):
        yield Change(path, "learn", True, False)
    for parameter in _learned(layer).values():
        parameter.requires_grad_(False)
        parameter.grad = None


def _restore(path: str, layer: nn.Module) -> Iterator[Change]:
    memory = getattr(layer, _MEMORY)
    learned = any(p.requires_grad for p in _learned(layer).values())
    by_class = isinstance(layer, Evaluating)
    for name, value in memory["switches"].items():
        if getattr(layer, name) != value:
            yield Change(path, name, getattr(layer, name), value)
        setattr(layer, name, value)
    if by_class and not memory["switches"]:
        yield Change(path, "statistics", "running", _BatchNormBase.statistics)
        yield Change(path, "update", False, _BatchNormBase.update)
    for name, learns in memory["learning"].items():
        _learned(layer)[name].requires_grad_(learns)
    if any(memory["learning"].values()) != learned:
        yield Change(path, "learn", learned, not learned)
    if isinstance(layer, Evaluating):
        layer.__class__ = layer._before_frozen  # type: ignore[assignment]
        vars(layer).pop("_checked", None)
    elif memory["class"] is not None:
        yield Change(path, "class", _name(type(layer)), _name(memory["class"]))
        vars(layer).pop("seen", None)
        layer.__class__ = memory["class"]
    for name in memory.get("absent", ()):
        vars(layer).pop(name, None)
    delattr(layer, _MEMORY)


def _thaw(path: str, layer: FrozenBatchNorm, dimensions: int | None) -> Iterator[Change]:
    """Make a FrozenBatchNorm a layer that learns."""
    new = _class_of(layer, dimensions, path)
    yield Change(path, "class", _name(type(layer)), _name(new))
    layer.__dict__.pop("seen", None)
    layer.__class__ = new  # type: ignore[assignment]
    for name in ("statistics", "update"):
        setattr(layer, name, getattr(_BatchNormBase, name))
    for name in ("weight", "bias"):
        value = getattr(layer, name)
        if value is not None:
            yield Change(path, name, "buffer", "parameter")
        delattr(layer, name)
        layer.register_parameter(name, None if value is None else nn.Parameter(value))


def _class_of(layer: FrozenBatchNorm, dimensions: int | None, path: str) -> type[_BatchNormBase]:
    dimensions = layer.seen if dimensions is None else dimensions
    if dimensions not in _BY_DIMENSIONS:
        raise BatchNormError(
            f"a FrozenBatchNorm takes any dimensions, and this one has seen {dimensions or 'none'}",
            where=f"unfreeze: {path}" if path else "unfreeze",
            do="say what it is to take with dimensions=4 (those of an input; 4 for images)",
        )
    return _BY_DIMENSIONS[dimensions]


def _name(cls: type) -> str:
    home = cls.__module__.partition(".")[0]
    return f"{'torch.nn' if home == 'torch' else home}.{cls.__name__}"
