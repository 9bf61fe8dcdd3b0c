"""Residual networks of fully connected layers: plain, with Batch Normalization, with SkipInit; one or many at once.

Every block adds variance to the signal unless something normalises it, so the highest learning rate that the plain
network bears falls with its depth, and that of the normalised one does not (Bjorck et al., 2018; De & Smith, 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.networks.folded import affine, batch_norm
from batchnorm.layers.batch import BatchNorm1d

NORMS = ("ours", "torch", "none")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "sigmoid": torch.sigmoid_}


class Residual(nn.Module):
    """``h = act(n(W x))``, then blocks ``h = act(h + s n(W2 act(n(W1 h))))``, then a linear read-out.

    >>> Residual(seed=0, blocks=2)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])

    ``n`` is Batch Normalization (``norm="ours"`` or ``"torch"``) or a bias (``"none"``). ``s`` is 1, or with
    ``skip_init`` a learned scalar for each block that begins at 0. Weights are Gaussian with variance 2 / fan-in.
    """

    def __init__(
        self,
        seed: int,
        *,
        blocks: int,
        width: int = 32,
        norm: str = "ours",
        activation: str = "relu",
        skip_init: bool = False,
        inputs: int = 64,
        classes: int = 10,
    ) -> None:
        """Draw the weights from the seed; the same ones whatever the norm."""
        super().__init__()
        if norm not in NORMS or activation not in ACTIVATIONS:
            what, given, known = ("norm", norm, NORMS) if norm not in NORMS else ("activation", activation, ACTIVATIONS)
            raise BatchNormError(f"there is no {what} {given!r}", do=f"choose one of {', '.join(known)}")
        self.activation, self.blocks = activation, blocks
        stream = torch.Generator().manual_seed(seed)
        layers = 2 * blocks + 1
        self.linears = nn.ModuleList(
            he_linear(stream, inputs if index == 0 else width, width, bias=norm == "none") for index in range(layers)
        )
        self.norms = nn.ModuleList(make_norm(norm, width, activation) for _ in range(layers if norm != "none" else 0))
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(blocks if skip_init else 0))
        self.read_out = he_linear(stream, width, classes, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Score a batch of any shape with the samples first."""
        h = self.unit(0, x.flatten(1))
        for block in range(self.blocks):
            h = self.unit(2 * block + 2, self.unit(2 * block + 1, h), h)
        return cast(Tensor, self.read_out(h))

    def unit(self, index: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply a linear layer, the norm, the residual and the nonlinearity."""
        z = self.linears[index](x)
        if self.norms:
            norm = self.norms[index]
            if isinstance(norm, BatchNorm1d) and norm.activation == self.activation:
                return norm(z, residual)  # all of it in one pass
            z = norm(z)
        if residual is not None:
            z = residual + (z * self.scales[index // 2 - 1] if self.scales else z)
        return ACTIVATIONS[self.activation](z)


def he_linear(stream: torch.Generator, inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """Make a linear layer with Gaussian weights of variance 2 / fan-in and biases of 0.

    >>> he_linear(torch.Generator().manual_seed(0), 3, 2, bias=True).bias.tolist()
    [0.0, 0.0]
    """
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=bias)  # draws nothing from the global stream
    layer.to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=stream) * math.sqrt(2 / inputs))
        if bias:
            layer.bias.zero_()
    return layer


def make_norm(norm: str, width: int, activation: str) -> nn.Module:
    """Make our layer, with the nonlinearity in it where it can be, or torch's.

    >>> make_norm("ours", 4, "relu").activation, make_norm("torch", 4, "relu").num_features
    ('relu', 4)
    """
    if norm == "torch":
        return nn.BatchNorm1d(width)
    return BatchNorm1d(width, activation="relu" if activation == "relu" else None)


class ResidualCopies(Copies):
    """Many residual networks side by side, by hand: one batched product for each layer, one call of our kernel.

    >>> copies = ResidualCopies([Residual(seed, blocks=1) for seed in range(3)])
    >>> copies.scores(torch.zeros(3, 4, 64)).shape
    torch.Size([3, 4, 10])

    It computes what `Copies` computes, with less overhead. Signals are (copies, channels, batch), so that the channels
    of all copies are neighbours in memory.
    """

    def __init__(self, networks: Sequence[Residual]) -> None:
        """Stack the networks' parameters and buffers; all must be built alike, with our norm or none."""
        super().__init__(networks)
        first = networks[0]
        self.blocks, self.activation = first.blocks, first.activation
        self.normalised, self.scaled = len(first.norms) > 0, len(first.scales) > 0
        self.fused = self.normalised and self.activation == "relu"

    def scores(self, x: Tensor) -> Tensor:
        """Score (copies, batch, ...) in training mode, each copy its own batch."""
        h = self._unit(0, x.flatten(2).transpose(1, 2))
        for block in range(self.blocks):
            h = self._unit(2 * block + 2, self._unit(2 * block + 1, h), h)
        return self._read_out(h)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Score (batch, ...) in evaluation mode, every copy the same batch."""
        act = IN_PLACE[self.activation]
        h = x.flatten(1).t().expand(len(self.named["read_out.weight"]), -1, -1)
        given = h
        for index in range(2 * self.blocks + 1):
            last_of_block = index > 0 and index % 2 == 0
            if index % 2 == 1:
                given = h  # the input of a block
            z = torch.baddbmm(*self._affine(index), h)
            if last_of_block:
                z = given.addcmul(z, self._scale(index)) if self.scaled else z.add_(given)
            h = act(z)
        return self._read_out(h)

    def _affine(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the shift and the weight of a layer with its norm folded into it."""
        weight = self.named[f"linears.{index}.weight"]
        if not self.normalised:
            return self.named[f"linears.{index}.bias"].unsqueeze(2), weight
        scale, shift = affine(*self._norm(index))
        return shift.unsqueeze(2), weight * scale.unsqueeze(2)

    def _norm(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name = f"norms.{index}."
        own = self.buffers
        return (
            own[f"{name}running_mean"], own[f"{name}running_var"], self.named[f"{name}weight"],
            self.named[f"{name}bias"],
        )  # fmt: skip

    def _scale(self, index: int) -> Tensor:
        scale: Tensor = self.named[f"scales.{index // 2 - 1}"]
        return scale.view(-1, 1, 1)

    def _unit(self, index: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weight = self.named[f"linears.{index}.weight"]
        if self.normalised:
            z = torch.bmm(weight, x)
            self.buffers[f"norms.{index}.num_batches_tracked"] += 1
            if self.fused:
                return batch_norm(z, *self._norm(index), activation="relu", residual=residual)
            z = batch_norm(z, *self._norm(index))
        else:
            z = torch.baddbmm(self.named[f"linears.{index}.bias"].unsqueeze(2), weight, x)
        if residual is not None:
            z = residual.addcmul(z, self._scale(index)) if self.scaled else residual + z
        # What the norm made may be kept for its backward pass; sums and products are not.
        keep = self.normalised and residual is None
        return (ACTIVATIONS if keep else IN_PLACE)[self.activation](z)

    def _read_out(self, h: Tensor) -> Tensor:
        bias = self.named["read_out.bias"].unsqueeze(2)
        return torch.baddbmm(bias, self.named["read_out.weight"], h).transpose(1, 2)
