"""Shared by probes: a model's parameters as one vector, the gradient there, and steps that are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.preserve import untouched

Loss = Callable[[nn.Module, Any], Tensor]


def learning(model: nn.Module, names: Sequence[str] | None, where: str) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, or those of them that are named (or lie under a named module).

    >>> list(learning(nn.Linear(2, 1), ["bias"], "probe"))
    ['bias']
    """
    every = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if names is not None:
        chosen = {n: p for n, p in every.items() if any(n == name or n.startswith(f"{name}.") for name in names)}
        missing = [name for name in names if not any(n == name or n.startswith(f"{name}.") for n in every)]
        if missing:
            raise BatchNormError(f"no trainable parameter is called {missing[0]!r}", where=where)
        every = chosen
    if not every:
        raise BatchNormError("the model has no trainable parameter", where=where)
    return every


def slope(model: nn.Module, batch: Any, loss: Loss, parameters: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """Return the loss and its gradient, and leave buffers, modes, gradients and random states as they were.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(3.0)
    >>> value, gradient = slope(layer, torch.ones(1, 1), lambda m, x: m(x).square().sum() / 2, [layer.weight])
    >>> value, gradient[0].item()
    (4.5, 3.0)
    """
    with untouched(model), torch.enable_grad():
        value = loss(model, batch)
        found = torch.autograd.grad(value, list(parameters), allow_unused=True)
    gradient = [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(parameters, found, strict=True)]
    return float(value.detach()), gradient


@contextmanager
def stepped(parameters: Sequence[Tensor], direction: Sequence[Tensor], distance: float) -> Iterator[None]:
    """Move parameters along a direction, and restore them exactly at the end, also after an error.

    >>> w = torch.ones(1)
    >>> with stepped([w], [torch.ones(1)], -0.5):
    ...     print(w)
    tensor([0.5000])
    >>> w
    tensor([1.])
    """
    before = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for parameter, part in zip(parameters, direction, strict=True):
                parameter.add_(part, alpha=distance)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the length of some tensors as one vector, in float64.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0])])
    5.0
    """
    return float(torch.stack([t.detach().double().square().sum() for t in tensors]).sum().sqrt())


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the inner product of two lists of tensors, each as one vector, in float64.

    >>> inner([torch.tensor([3.0])], [torch.tensor([2.0])])
    6.0
    """
    return float(
        torch.stack([(a.detach().double() * b.detach().double()).sum() for a, b in zip(one, other, strict=True)]).sum()
    )


def cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the cosine of the angle between two lists of tensors; NaN if one of them is zero.

    >>> round(cosine([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]), 4)
    0.7071
    """
    lengths = norm(one) * norm(other)
    return inner(one, other) / lengths if lengths else float("nan")
