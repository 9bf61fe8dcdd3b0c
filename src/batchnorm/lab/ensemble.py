"""Many copies of any network side by side: each computes what it would compute by itself, in fewer, larger steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap


class Stack(Protocol):
    """Copies of a network, all of them trained in one step. Every tensor has the copies along its first axis."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are trained: they share the stack's memory and record no gradient."""

    def gradients(self, losses: Tensor) -> list[Tensor]:
        """Differentiate each copy's loss by its own parameters."""

    def scores(self, x: Tensor) -> Tensor:
        """Score (copies, batch, ...) in training mode, each copy its own batch: (copies, batch, classes)."""

    def evaluate(self, x: Tensor) -> Tensor:
        """Score (batch, ...) in evaluation mode, every copy the same batch: (copies, batch, classes)."""

    def keep(self, kept: Tensor) -> None:
        """Drop all copies but these."""


class Copies:
    """Copies of any network under ``torch.func.vmap``.

    >>> copies = Copies([nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) for _ in range(3)])
    >>> copies.scores(torch.zeros(3, 5, 2, 2)).shape, copies.evaluate(torch.zeros(7, 2, 2)).shape
    (torch.Size([3, 5, 2]), torch.Size([3, 7, 2]))

    The networks must be built alike; the given ones are not changed. Gradients are taken outside, with autograd.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Stack the networks' parameters and buffers."""
        named, self.buffers = stack_module_state(list(networks))
        self.named = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        self.frozen = {name: tensor for name, tensor in named.items() if not tensor.requires_grad}
        self.template = copy.deepcopy(networks[0]).to("meta")

    @property
    def parameters(self) -> list[Tensor]:
        """The stacked parameters that are trained."""
        return [parameter.detach() for parameter in self.named.values()]

    def gradients(self, losses: Tensor) -> list[Tensor]:
        """Differentiate each copy's loss by its own parameters."""
        return differentiated(losses, list(self.named.values()))

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the ``state_dict`` of one copy."""
        return {name: t[index].detach() for name, t in {**self.named, **self.frozen, **self.buffers}.items()}

    def scores(self, x: Tensor) -> Tensor:
        """Score (copies, batch, ...) in training mode, each copy its own batch."""
        return self._run(x, 0, True)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Score (batch, ...) in evaluation mode, every copy the same batch."""
        return self._run(x, None, False)

    def keep(self, kept: Tensor) -> None:
        """Drop all copies but these."""
        self.named = {name: t.detach()[kept].requires_grad_() for name, t in self.named.items()}
        self.frozen = {name: t[kept] for name, t in self.frozen.items()}
        self.buffers = {name: t[kept] for name, t in self.buffers.items()}

    def _run(self, x: Tensor, axis: int | None, training: bool) -> Tensor:
        template = self.template.train(training)

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return cast(Tensor, functional_call(template, (parameters, buffers), (x,)))

        many = vmap(one, in_dims=(0, 0, axis), randomness="different")
        return many({**self.named, **self.frozen}, self.buffers, x)


class Single:
    """One network as a stack of one, without vmap: for what vmap cannot run, and what it is compared with.

    >>> Single(nn.Linear(4, 2)).scores(torch.zeros(1, 5, 4)).shape
    torch.Size([1, 5, 2])

    It is this very network that is trained.
    """

    def __init__(self, network: nn.Module) -> None:
        """Take the network as it is."""
        self.network = network
        self.trained = [parameter for parameter in network.parameters() if parameter.requires_grad]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are trained, with an axis for the one copy."""
        return [parameter.detach().unsqueeze(0) for parameter in self.trained]

    def gradients(self, losses: Tensor) -> list[Tensor]:
        """Differentiate the copy's loss by its own parameters."""
        return [gradient.unsqueeze(0) for gradient in differentiated(losses, self.trained)]

    def scores(self, x: Tensor) -> Tensor:
        """Score (1, batch, ...) in training mode."""
        return cast(Tensor, self.network.train()(x[0])).unsqueeze(0)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Score (batch, ...) in evaluation mode."""
        return cast(Tensor, self.network.eval()(x)).unsqueeze(0)

    def keep(self, kept: Tensor) -> None:
        """Do nothing: there is one copy, and nothing trains it on once it has diverged."""


def differentiated(losses: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of the summed losses; 0 for a parameter that took no part.

    >>> w, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> differentiated(3 * w, [w, unused])
    [tensor([3., 3.]), tensor([0.])]

    Each loss depends on its own copy only: the gradient of the sum is every copy's own gradient.
    """
    gradients = torch.autograd.grad(losses.sum(), list(parameters), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
