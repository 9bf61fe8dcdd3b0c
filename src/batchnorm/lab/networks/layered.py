"""Fully connected layers and a linear read-out, as in the paper's Figure 1: plain or with Batch Normalization."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from batchnorm.lab.ensemble import Copies
from batchnorm.lab.networks.folded import affine, batch_norm
from batchnorm.lab.networks.residual import ACTIVATIONS, IN_PLACE
from batchnorm.lab.networks.schemes import deviation
from batchnorm.layers.batch import BatchNorm1d


class Layered(nn.Module):
    """``h = act(n(W h))`` for each layer, then a linear read-out; ``n`` is Batch Normalization, or a bias.

    >>> Layered(seed=0, normalised=True, inputs=64)(torch.zeros(3, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        seed: int,
        *,
        normalised: bool,
        init: str = "small-gaussian",
        activation: str = "sigmoid",
        inputs: int = 784,
        width: int = 100,
        layers: int = 3,
        classes: int = 10,
    ) -> None:
        """Draw Gaussian weights of a named scheme from the seed; the same ones with Batch Normalization and without."""
        super().__init__()
        self.activation = activation
        stream = torch.Generator().manual_seed(seed)
        sizes = (inputs, *[width] * layers, classes)
        with torch.device("meta"):  # draws nothing from the global stream
            linears = [
                nn.Linear(fan_in, fan_out, bias=not normalised or index == layers)
                for index, (fan_in, fan_out) in enumerate(pairwise(sizes))
            ]
        self.linears = nn.ModuleList(linear.to_empty(device="cpu") for linear in linears)
        self.norms = nn.ModuleList(BatchNorm1d(width) for _ in range(layers if normalised else 0))
        with torch.no_grad():
            for linear in linears:
                fan_in, fan_out = linear.in_features, linear.out_features
                drawn = torch.randn(fan_out, fan_in, generator=stream)
                linear.weight.copy_(drawn * deviation(init, fan_in, fan_out))
                if linear.bias is not None:
                    linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Score a batch of any shape with the samples first."""
        return cast(Tensor, self.linears[-1](ACTIVATIONS[self.activation](self.last_inputs(x))))

    def last_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the last hidden layer's activations: (batch, width)."""
        h = x.flatten(1)
        for index, linear in enumerate(self.linears[:-1]):
            h = linear(ACTIVATIONS[self.activation](h) if index else h)
            if self.norms:
                h = self.norms[index](h)
        return h


class LayeredCopies(Copies):
    """Many such networks side by side: one batched product for each layer, one call of our kernel.

    >>> copies = LayeredCopies([Layered(seed, normalised=True, inputs=64) for seed in range(3)])
    >>> copies.scores(torch.zeros(3, 4, 64)).shape, copies.last_inputs(torch.zeros(7, 64)).shape
    (torch.Size([3, 4, 10]), torch.Size([3, 7, 100]))

    ``places`` are the numbers of the copies that are still in the stack. Signals are (copies, channels, batch).
    """

    def __init__(self, networks: Sequence[Layered]) -> None:
        """Stack the networks' parameters and buffers; all must be built alike."""
        super().__init__(networks)
        self.activation = networks[0].activation
        self.layers, self.normalised = len(networks[0].linears) - 1, len(networks[0].norms) > 0
        self.places = list(range(len(networks)))

    def keep(self, kept: Tensor) -> None:
        """Drop all copies but these."""
        super().keep(kept)
        self.places = [self.places[index] for index in kept.tolist()]

    def scores(self, x: Tensor) -> Tensor:
        """Score (copies, batch, ...) in training mode, each copy its own batch."""
        h = x.flatten(2).transpose(1, 2)
        for index in range(self.layers):
            weight = self.named[f"linears.{index}.weight"]
            if self.normalised:
                self.buffers[f"norms.{index}.num_batches_tracked"] += 1
                h = ACTIVATIONS[self.activation](batch_norm(torch.bmm(weight, h), *self._norm(index)))
            else:
                h = self._act(torch.baddbmm(self.named[f"linears.{index}.bias"].unsqueeze(2), weight, h))
        return self._linear(self.layers, h).transpose(1, 2)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Score (batch, ...) in evaluation mode, every copy the same batch."""
        return self._linear(self.layers, self._act(self._last_inputs(x))).transpose(1, 2)

    @torch.no_grad()
    def last_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the last hidden layer's activations in evaluation mode: (copies, batch, width)."""
        return self._last_inputs(x).transpose(1, 2)

    def _last_inputs(self, x: Tensor) -> Tensor:
        h = x.flatten(1).t().expand(len(self.places), -1, -1)
        for index in range(self.layers):
            h = self._linear(index, self._act(h) if index else h)
        return h

    def _act(self, h: Tensor) -> Tensor:
        return IN_PLACE[self.activation](h)

    def _linear(self, index: int, h: Tensor) -> Tensor:
        """Apply a linear layer, with the norm after it folded into it if there is one."""
        weight = self.named[f"linears.{index}.weight"]
        if not self.normalised or index == self.layers:
            return torch.baddbmm(self.named[f"linears.{index}.bias"].unsqueeze(2), weight, h)
        scale, shift = affine(*self._norm(index))
        return torch.baddbmm(shift.unsqueeze(2), weight * scale.unsqueeze(2), h)

    def _norm(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name, own = f"norms.{index}.", self.buffers
        running = own[f"{name}running_mean"], own[f"{name}running_var"]
        return (*running, self.named[f"{name}weight"], self.named[f"{name}bias"])
