"""Walk along the gradient with every copy of a stack, and take it back: the loss and the gradient at each step size.

*Raw*, every parameter moves by the same multiple of its gradient. *Corrected*, the weights in front of a norm move by
the effective rate: multiplied by (their norm / their norm at the start) squared, layer by layer, and changes of their
gradients are multiplied by that ratio. Scaling such weights, which does not change the function of the network with
Batch Normalization, changes what is measured raw, and does not change what is measured corrected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from batchnorm.lab.networks.layered import LayeredCopies
from batchnorm.lab.trainer import along, copy_losses


@dataclass(frozen=True)
class Walk:
    """Losses and changes of the gradient at each step size: (sizes, copies)."""

    losses: Tensor
    changes: Tensor

    def bands(self) -> dict[str, Tensor]:
        """Return the least and the largest of both, over the step sizes.

        >>> Walk(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5], [0.25]])).bands()["loss high"]
        tensor([3.])
        """
        found = {"loss": self.losses, "change": self.changes}
        return {
            f"{name} {side}": values.amin(0) if side == "low" else values.amax(0)
            for name, values in found.items()
            for side in ("low", "high")
        }


def hidden(stack: LayeredCopies) -> list[bool]:
    """Say of each parameter whether it is the weight of a hidden layer, which a norm may follow.

    >>> from batchnorm.lab.networks.layered import Layered
    >>> sum(hidden(LayeredCopies([Layered(0, normalised=True, layers=3)])))
    3
    """
    names = [f"linears.{index}.weight" for index in range(stack.layers)]
    return [name in names for name in stack.named]


def norms(stack: LayeredCopies) -> list[Tensor]:
    """Return the norm of each parameter of each copy, in float64.

    >>> from batchnorm.lab.networks.layered import Layered
    >>> norms(LayeredCopies([Layered(0, normalised=True, layers=1)]))[3].item()  # of gamma
    10.0
    """
    return [lengths(parameter) for parameter in stack.parameters]


def lengths(tensor: Tensor) -> Tensor:
    """Return the norm of each copy's part of a tensor, in float64.

    >>> lengths(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist()
    [5.0, 2.0]
    """
    found: Tensor = torch.linalg.vector_norm(tensor.detach().double().flatten(1), dim=1)
    return found


def walk(
    stack: LayeredCopies,
    x: Tensor,
    labels: Tensor,
    sizes: Sequence[float],
    start: Sequence[Tensor] | None = None,
) -> Walk:
    """Measure losses and gradients at some multiples of the gradient; the stack is as it was afterwards.

    >>> from batchnorm.lab.networks.layered import Layered
    >>> stack = LayeredCopies([Layered(0, normalised=True, inputs=4, init="he")])
    >>> x, labels = torch.randn(1, 8, 4), torch.zeros(1, 8, dtype=torch.int64)
    >>> walk(stack, x, labels, (0.1, 0.2)).losses.shape
    torch.Size([2, 1])

    With ``start``, the norms of the parameters at the start of training, the walk is corrected. Losses are those of
    training mode: batch statistics.
    """
    with restored(stack):
        gradient = stack.gradients(copy_losses(stack.scores(x), labels))
        factors = [torch.ones(len(x), dtype=torch.float64) for _ in gradient]
        if start is not None:
            ratios = [now / then for now, then in zip(norms(stack), start, strict=True)]
            factors = [ratio if own else one for ratio, one, own in zip(ratios, factors, hidden(stack), strict=True)]
        before = [parameter.clone() for parameter in stack.parameters]
        losses, changes = [], []
        for size in sizes:
            with torch.no_grad():
                for parameter, point, part, factor in zip(stack.parameters, before, gradient, factors, strict=True):
                    parameter.copy_(point - along(size * factor**2, part) * part)
            found = copy_losses(stack.scores(x), labels)
            there = stack.gradients(found)
            moved = [factor * lengths(a - b) for a, b, factor in zip(there, gradient, factors, strict=True)]
            losses.append(found.detach().double())
            changes.append(torch.linalg.vector_norm(torch.stack(moved), dim=0))
    return Walk(torch.stack(losses), torch.stack(changes))


@contextmanager
def restored(stack: LayeredCopies) -> Iterator[None]:
    """Put parameters and buffers back exactly, whatever happens.

    >>> from batchnorm.lab.networks.layered import Layered
    >>> stack = LayeredCopies([Layered(0, normalised=True)])
    >>> with restored(stack):
    ...     _ = stack.parameters[-2].zero_()  # gamma
    >>> stack.parameters[-2].mean().item()
    1.0
    """
    held = [*stack.parameters, *stack.buffers.values()]
    before = [tensor.clone() for tensor in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)


@contextmanager
def scaled(stack: LayeredCopies, factor: float) -> Iterator[None]:
    """Multiply the weights of the hidden layers: behind them, Batch Normalization divides it out again.

    >>> from batchnorm.lab.networks.layered import Layered
    >>> stack = LayeredCopies([Layered(0, normalised=True, inputs=4, init="he")])
    >>> x = torch.randn(1, 8, 4)
    >>> before = stack.scores(x)
    >>> with scaled(stack, 3.0):
    ...     bool((stack.scores(x) - before).abs().max() < 1e-3)
    True
    """
    with restored(stack):
        with torch.no_grad():
            for parameter, own in zip(stack.parameters, hidden(stack), strict=True):
                if own:
                    parameter.mul_(factor)
        yield
