"""``freeze`` and ``unfreeze``: make the BN layers of a model constant, whatever ``train()`` says, and back again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d, _Fast
from batchnorm.layers.frozen import FrozenBatchNorm
from batchnorm.records import Change, Report
from batchnorm.transforms.follow import Optimizers as Optimizers
from batchnorm.transforms.follow import carry_over as carry_over
from batchnorm.transforms.follow import check_changeable, scripted_norms
from batchnorm.transforms.follow import check_optimizers as check_optimizers
from batchnorm.transforms.follow import copied_with as copied_with
from batchnorm.transforms.follow import copy_model as copy_model
from batchnorm.transforms.left_behind import left_behind

Modules = Iterable["str | nn.Module"] | str | nn.Module | None

# A torch layer keeps its object, and with it its hooks, its users and its parameters, and gets another class: ours
# has the switches that train() does not touch. The memory of what it was is an attribute of the layer, so that it is
# copied, pickled and saved with it.
_OURS: dict[type[nn.Module], type[_Fast]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.SyncBatchNorm: FrozenBatchNorm,  # which takes any dimensions too, and has nothing to synchronise
}
_BY_DIMENSIONS: dict[int, type[_Fast]] = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}
_MEMORY = "_before_freeze"


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
      2: a GroupNorm is no batch normalisation
    >>> import torch
    >>> y = frozen.train()(torch.randn(4, 3, 8, 8))
    >>> int(frozen[1].num_batches_tracked), frozen[1].weight.requires_grad
    (0, False)

    A frozen layer normalises with its running statistics, updates nothing, and its gamma and beta do not learn, also
    after ``train()``. Its class stays, with an activation or whatever else it does; only torch's own layers, which
    cannot survive ``train()``, become ours. Names in the ``state_dict`` stay as they are. `unfreeze` puts back what
    was. Layers without running statistics, and subclasses of torch's layers, are left alone, and the report says why.

    ``modules``: names of layers or of what contains them, or the modules themselves; None is the whole model.
    ``optimizer``: one or several, made for ``model``; they go over to the copy with their groups and their state.
    Gradients of gamma and beta that are left over are dropped, so that momentum and weight decay do not move them
    either: torch's optimisers skip a parameter that has no gradient.
    ``inplace``: change the model itself, and return it with the report.
    """
    target, chosen = _begin(model, modules, optimizer, inplace, "freeze")
    changes: list[Change] = []
    left: dict[str, str] = {}
    layers: list[tuple[str, _BatchNorm]] = []
    for path, module, first in _named(target, chosen):
        reason = f"the same layer as {first!r}" if first is not None else _why_not(module)
        if reason:
            left[path] = reason
        elif isinstance(module, _BatchNorm):
            layers.append((path, module))
    # Look at all of them before any changes: layers may share a gamma.
    memories = [_remember(layer) for _, layer in layers]
    for (path, layer), memory in zip(layers, memories, strict=True):
        setattr(layer, _MEMORY, memory)
        changes += _freeze(path, layer, memory)
    left |= scripted_norms(target, "freeze it before torch.jit.script")
    left_behind(model, target, "freeze", inplace=True)
    return target, Report(tuple(changes), left)


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
    gamma and beta become new parameters, which the report names: give them to an optimiser.
    """
    if dimensions is not None and dimensions not in _BY_DIMENSIONS:
        raise BatchNormError(f"dimensions is {dimensions!r}", where="unfreeze", do="use those of an input: 2 to 5")
    # Whatever cannot be done ends before anything is copied or changed.
    check_changeable(model, "unfreeze", inplace=inplace)
    for path, module, first in _named(model, _choose(model, modules, "unfreeze")):
        if type(module) is FrozenBatchNorm and first is None and not hasattr(module, _MEMORY):
            _class_of(module, dimensions, path)
    target, chosen = _begin(model, modules, optimizer, inplace, "unfreeze")
    changes: list[Change] = []
    left: dict[str, str] = {}
    for path, module, first in _named(target, chosen):
        if first is not None:
            left[path] = f"the same layer as {first!r}"
        elif hasattr(module, _MEMORY):
            assert isinstance(module, _Fast)
            changes += _restore(path, module)
        elif type(module) is FrozenBatchNorm:
            changes += _thaw(path, module, dimensions)
        elif isinstance(module, _BatchNorm):
            by_hand = isinstance(module, _Fast) and is_frozen(module)
            left[path] = "frozen by its switches, not by freeze: set them" if by_hand else "not frozen"
    left_behind(model, target, "unfreeze", inplace=True)
    return target, Report(tuple(changes), left)


def is_frozen(layer: nn.Module) -> bool:
    """Whether the statistics of a layer are held fixed by its switches, in training too.

    >>> is_frozen(FrozenBatchNorm(3)), is_frozen(BatchNorm1d(3).eval())
    (True, False)
    """
    return isinstance(layer, _Fast) and layer.statistics == "running" and layer.update is False


def _begin(
    model: nn.Module, modules: Modules, optimizer: Optimizers, inplace: bool, where: str
) -> tuple[nn.Module, tuple[str, ...] | None]:
    """Check the arguments, then make the copy that may be changed."""
    check_changeable(model, where, inplace=inplace)
    chosen = _choose(model, modules, where)
    optimizers = check_optimizers(model, optimizer, where)
    return (model if inplace else copy_model(model, optimizers)), chosen


def _choose(model: nn.Module, modules: Modules, where: str) -> tuple[str, ...] | None:
    """Turn what the caller named into paths, which hold for a copy too; None is everything."""
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


def _named(model: nn.Module, chosen: tuple[str, ...] | None) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield the normalising modules chosen: path, module, and, of one met before, the path where it was met."""
    met: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if chosen is not None and not any(path == c or not c or path.startswith(c + ".") for c in chosen):
            continue
        leaf = next(module.children(), None) is None
        if isinstance(module, _BatchNorm) or (leaf and "norm" in type(module).__name__.lower()):
            yield path, module, met.get(module)
            met.setdefault(module, path)


def _why_not(module: nn.Module) -> str | None:
    """Say why a layer cannot be frozen, or None."""
    name = type(module).__name__
    if not isinstance(module, _BatchNorm):
        return f"{'an' if name[0] in 'AEIOR' else 'a'} {name} is no batch normalisation"
    if any(tensor is not None and is_lazy(tensor) for tensor in module._parameters.values()):
        return "not initialised yet: run the model once"
    if module.running_mean is None or module.running_var is None:
        return "it has no running statistics to normalise with"
    if hasattr(module, _MEMORY) or type(module) is FrozenBatchNorm:
        return "frozen already"
    if is_parametrized(module):
        return "its parameters are computed from others (parametrised)"
    if not isinstance(module, _Fast) and type(module) not in _OURS:
        return f"{name} is a subclass of torch's layer, and may compute something else: freeze it in its own way"
    return None


def _remember(layer: _BatchNorm) -> dict[str, Any]:
    switches = {name: getattr(layer, name, getattr(_Fast, name)) for name in ("statistics", "update")}
    learning = {name: p.requires_grad for name in ("weight", "bias") if (p := getattr(layer, name)) is not None}
    return {"class": type(layer), "switches": switches, "learning": learning}


def _freeze(path: str, layer: _BatchNorm, memory: dict[str, Any]) -> Iterator[Change]:
    if not isinstance(layer, _Fast):
        new = _OURS[type(layer)]
        yield Change(path, "class", _name(type(layer)), _name(new))
        layer.__class__ = new
    assert isinstance(layer, _Fast)
    for name, value in (("statistics", "running"), ("update", False)):
        if memory["switches"][name] != value:
            yield Change(path, name, memory["switches"][name], value)
        setattr(layer, name, value)
    if any(memory["learning"].values()):
        yield Change(path, "learn", True, False)
    for name in memory["learning"]:
        parameter = getattr(layer, name)
        parameter.requires_grad_(False)
        parameter.grad = None


def _restore(path: str, layer: _Fast) -> Iterator[Change]:
    memory = getattr(layer, _MEMORY)
    learned = layer.learn
    for name, value in memory["switches"].items():
        if getattr(layer, name) != value:
            yield Change(path, name, getattr(layer, name), value)
        setattr(layer, name, value)
    for name, learns in memory["learning"].items():
        getattr(layer, name).requires_grad_(learns)
    if any(memory["learning"].values()) != learned:
        yield Change(path, "learn", learned, not learned)
    if memory["class"] is not type(layer):
        yield Change(path, "class", _name(type(layer)), _name(memory["class"]))
        for name in (*memory["switches"], "seen"):  # a torch layer has none of them
            layer.__dict__.pop(name, None)
        layer.__class__ = memory["class"]
    delattr(layer, _MEMORY)


def _thaw(path: str, layer: FrozenBatchNorm, dimensions: int | None) -> Iterator[Change]:
    """Make a FrozenBatchNorm a layer that learns."""
    new = _class_of(layer, dimensions, path)
    yield Change(path, "class", _name(type(layer)), _name(new))
    layer.__dict__.pop("seen", None)
    layer.__class__ = new  # type: ignore[assignment]
    for name in ("statistics", "update"):
        setattr(layer, name, getattr(_Fast, name))
    for name in ("weight", "bias"):
        value = getattr(layer, name)
        if value is not None:
            yield Change(path, name, "buffer", "parameter")
        delattr(layer, name)
        layer.register_parameter(name, None if value is None else nn.Parameter(value))


def _class_of(layer: FrozenBatchNorm, dimensions: int | None, path: str) -> type[_Fast]:
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
