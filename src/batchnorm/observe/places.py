"""Select the layers to observe; `places` has the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from batchnorm.errors import BatchNormError

Layers = str | Iterable[str] | Mapping[str, str] | None

ACTIVATIONS: dict[type[nn.Module], str] = {
    kind: kind.__name__.lower()
    for kind in (
        nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
        nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink,
        nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
    )
}  # fmt: skip
MAKERS: dict[type[nn.Module], str] = {nn.Linear: "linear", nn.Bilinear: "linear", _ConvNd: "convolution"}


@dataclass(frozen=True, eq=False)
class Place:
    """The input or output of one module: its name in the records, its path, and its kind.

    >>> Place("bn1", "bn1", nn.BatchNorm1d(3), "batch norm", "input").at
    'input'
    """

    layer: str
    path: str
    module: nn.Module
    kind: str
    at: str


def places(model: nn.Module, layers: Layers = None, where: str = "watch") -> list[Place]:
    """Return the places at which the signal of a model is recorded.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sigmoid())
    >>> [(place.layer, place.at) for place in places(model)]
    [('0', 'output'), ('1', 'input'), ('1 (output)', 'output'), ('2', 'input')]
    >>> [place.layer for place in places(model, {"layer 1": "2"})]
    ['layer 1']

    **The rule:** a signal is looked at where it arrives, at the input of an activation module or of a BN layer. The
    output of a linear, convolutional or BN layer is looked at too, unless one of those takes it directly: then it has
    been seen there. So a network whose activations are functions is seen at the outputs of its layers, before the
    activation. (Which output is taken by whom shows when the model runs; here all are listed.)

    ``layers`` selects: paths of modules, or patterns with ``*``; a path stands for everything in it, too. A dictionary
    gives names: ``{"layer 1": "net.1"}``. A module that is named and is of no kind above is looked at at its input.
    """
    modules = dict(model.named_modules())
    found = [place for path, module in modules.items() for place in _of(path or _class(module), path, module)]
    if layers is None:
        return found
    chosen: dict[tuple[str, str], Place] = {}
    for name, pattern in _named(layers, where):
        fitting = [place for place in found if _fits(place.path, pattern)]
        if name and any(place.path == pattern for place in fitting):
            fitting = _of(name, pattern, modules[pattern])
        elif name and fitting:
            inside = sorted({place.path for place in fitting})
            raise BatchNormError(
                f"{name!r} is the name of {pattern!r}, which holds {len(inside)} layers: {', '.join(inside[:3])}...",
                where=where,
                do="name one layer, or give patterns without names",
            )
        if not fitting and pattern in modules:
            fitting = [Place(name or pattern, pattern, modules[pattern], _class(modules[pattern]).lower(), "input")]
        if not fitting:
            raise BatchNormError(
                f"no layer fits {pattern!r}", where=where, do="use paths of model.named_modules(), or patterns with *"
            )
        chosen.update({(place.layer, place.at): place for place in fitting})
    order = {path: number for number, path in enumerate(modules)}
    return sorted(chosen.values(), key=lambda place: order[place.path])


def weighted(model: nn.Module, layers: Layers = None, where: str = "watch") -> dict[str, nn.Module]:
    """Return the modules that hold parameters themselves, by the name they have in the records.

    >>> list(weighted(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.BatchNorm1d(4))))
    ['0', '2']
    """
    # Not by parameters(), which a model may define without arguments.
    own = {path: m for path, m in model.named_modules() if any(p is not None for p in m._parameters.values())}
    if layers is None:
        return {path or _class(module): module for path, module in own.items()}
    found: dict[str, nn.Module] = {}
    for name, pattern in _named(layers, where):
        for path, module in own.items():
            if _fits(path, pattern):
                found[name or path or _class(module)] = module
    return found


def activation_of(module: nn.Module) -> str | None:
    """Name the kind of an activation module; None of other modules.

    >>> activation_of(nn.ReLU6()), activation_of(nn.Linear(1, 1))
    ('relu6', None)
    """
    return next((ACTIVATIONS[kind] for kind in type(module).__mro__ if kind in ACTIVATIONS), None)


def _of(layer: str, path: str, module: nn.Module) -> list[Place]:
    activation = activation_of(module)
    if activation is not None:
        return [Place(layer, path, module, activation, "input")]
    if isinstance(module, _BatchNorm):
        # Of our layers with an activation inside, the output is that of the activation.
        after = getattr(module, "activation", None)
        after = after if isinstance(after, str) and after != "none" else "batch norm"
        return [
            Place(layer, path, module, "batch norm", "input"),
            Place(f"{layer} (output)", path, module, after.replace("_", ""), "output"),
        ]
    kind = next((MAKERS[kind] for kind in type(module).__mro__ if kind in MAKERS), None)
    return [] if kind is None else [Place(layer, path, module, kind, "output")]


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _named(layers: Layers, where: str) -> list[tuple[str, str]]:
    """The patterns, each with the name it has, if any."""
    if isinstance(layers, str):
        return [("", layers)]
    named = list(layers.items()) if isinstance(layers, Mapping) else [("", pattern) for pattern in layers or ()]
    for name, pattern in named:
        if not isinstance(name, str) or not isinstance(pattern, str):
            raise BatchNormError(f"layers has {pattern!r} in it", where=where, do="give paths or patterns, as text")
    if not named:
        raise BatchNormError("layers selects nothing", where=where, do="leave it out for all layers")
    return named
