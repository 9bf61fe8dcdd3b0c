"""Which parameters of a model are trained, which modules are copies of others, and which claim to be frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

Learns = Callable[[nn.Parameter], bool]
FEW = 64  # values of each parameter that are compared
ALIKE = 0.5  # cosine between the parameters of a copy and those of the original; independent networks have about 0
_FROZEN = {"freeze", "freezed", "frozen", "fix", "fixed", "lock", "locked", "eval"}
_NORM = {"bn", "batchnorm", "norm", "norms", "bns", "stats", "statistics"}
_NEITHER = {"affine", "weight", "weights", "bias", "gamma", "beta", "grad"}


def held_by(optimizers: Iterable[Optimizer]) -> Learns:
    """Return a function that says whether a parameter requires gradients and is in one of the optimizers.

    >>> model = nn.Linear(2, 1)
    >>> learns = held_by([torch.optim.SGD([model.weight], lr=0.1)])
    >>> learns(model.weight), learns(model.bias)
    (True, False)
    """
    held = held_in(optimizers)
    return lambda parameter: parameter.requires_grad and id(parameter) in held


def held_in(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters in some optimizers.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> held_in([torch.optim.SGD([weight], lr=0.1)]) == {id(weight)}
    True
    """
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def requires_grad(parameter: nn.Parameter) -> bool:
    """Whether a parameter requires gradients: what learns, as far as is known without an optimizer.

    >>> requires_grad(nn.Parameter(torch.zeros(1)))
    True
    """
    return parameter.requires_grad


def affine(layer: _BatchNorm) -> list[nn.Parameter]:
    """Return gamma and beta, where the layer has them.

    >>> len(affine(nn.BatchNorm1d(2))), affine(nn.BatchNorm1d(2, affine=False))
    (2, [])
    """
    return [p for p in (layer.weight, layer.bias) if isinstance(p, nn.Parameter)]


def frozen_around(model: nn.Module, path: str, learns: Learns) -> list[nn.Module]:
    """Return the modules around a layer in which nothing learns, the innermost first, without the model itself.

    >>> model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)).requires_grad_(False), nn.Linear(2, 1))
    >>> len(frozen_around(model, "0.0", requires_grad))
    1
    """
    parts = path.split(".")
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1)]
    return [module for module in around if is_frozen(module, learns)]


def is_frozen(module: nn.Module, learns: Learns) -> bool:
    """Whether a module has parameters and none of them learns.

    >>> is_frozen(nn.Linear(2, 1), requires_grad)
    False
    """
    parameters = list(module.parameters())
    return bool(parameters) and not any(learns(p) for p in parameters)


def meant_frozen(model: nn.Module, path: str, layer: _BatchNorm, learns: Learns, *, copies: bool = False) -> bool:
    """Whether nothing of a layer learns and the model shows that this is meant.

    >>> model = nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.Linear(2, 1))
    >>> meant_frozen(model, "0", model[0], requires_grad)
    True

    A layer without gamma and beta has to be in a part of the model that is frozen. Layers of a part that is a copy of
    one that learns (a momentum encoder, whose statistics are meant to move) count only with ``copies=True``.
    """
    if any(learns(p) for p in affine(layer)):
        return False
    around = frozen_around(model, path, learns)
    if not around and not affine(layer):
        return False
    return copies or not any(_is_copy(model, module, learns) for module in around)


def _is_copy(model: nn.Module, frozen: nn.Module, learns: Learns) -> bool:
    """Whether another module of the same make learns and has nearly the same parameters."""
    shapes = _shapes(frozen)
    return any(
        other is not frozen
        and type(other) is type(frozen)
        and not is_frozen(other, learns)
        and _shapes(other) == shapes
        and _alike(frozen, other)
        for other in model.modules()
    )


def _shapes(module: nn.Module) -> Mapping[str, Any]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _alike(one: nn.Module, other: nn.Module) -> bool:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    weights = [(p, q) for p, q in pairs if p.dim() > 1] or pairs  # gammas and betas begin equal everywhere
    if any(p.is_meta or q.is_meta for p, q in weights):
        return True
    a, b = (torch.cat([t.detach().flatten()[:FEW].double().cpu() for t in side]) for side in zip(*weights, strict=True))
    return float(a @ b) > ALIKE * float(a.norm() * b.norm())


def first_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of the first values of some parameters, to see later whether they have changed.

    >>> [t.tolist() for t in first_values([torch.zeros(2, 1)])]
    [[0.0, 0.0]]
    """
    return [p.detach().flatten()[:FEW].clone() for p in parameters]


@dataclass(frozen=True)
class Flag:
    """A module with an attribute that claims that its norms are frozen."""

    path: str
    attribute: str
    hides: bool  # a method of the class has that name, too
    layers: tuple[str, ...]  # the BN layers in it

    @property
    def words(self) -> str:
        """Describe the attribute."""
        hidden = f", which hides the method {self.attribute}() of its class: nothing can call it" if self.hides else ""
        return f"its attribute {self.attribute} is True{hidden}"


def flags(model: nn.Module, layers: Sequence[str]) -> Iterator[Flag]:
    """Yield the modules with an attribute such as ``freeze_bn`` or ``norm_eval`` that is True, and their BN layers.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> model.freeze_bn = True
    >>> [(flag.attribute, flag.hides, flag.layers) for flag in flags(model, ["0"])]
    [('freeze_bn', False, ('0',))]
    """
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        own = tuple(layer for layer in layers if layer.startswith(start))
        for name in [n for n, value in vars(module).items() if value is True and own]:
            words = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().replace("batch_norm", "bn").split("_"))
            if words & _FROZEN and words & _NORM and not words & _NEITHER:
                yield Flag(path, name, callable(getattr(type(module), name, None)), own)
