"""A chain of fully connected layers, each followed by any brick of the family and ReLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from batchnorm.lab.networks.residual import he_linear
from batchnorm.layers.family import make_norm


class Chain(nn.Module):
    """``h = relu(n(W h))`` for each width, then a linear read-out; ``n`` is a brick of `batchnorm.make_norm`.

    >>> Chain(seed=0, norm="group", options={"groups": 8})(torch.zeros(3, 64)).shape
    torch.Size([3, 10])

    ``norm`` is a name or a callable, "none" is a bias. Weights are Gaussian with variance 2 / fan-in, drawn from the
    seed, the same ones whatever the norm.
    """

    def __init__(
        self,
        seed: int,
        norm: str | Callable[..., nn.Module] = "batch",
        *,
        inputs: int = 64,
        widths: Sequence[int] = (64, 64, 64),
        classes: int = 10,
        dropout: float = 0.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Draw the weights from the seed."""
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        self.linears, self.norms = nn.ModuleList(), nn.ModuleList()
        for width in widths:
            linear = he_linear(stream, inputs, width, bias=norm == "none")
            self.linears.append(linear)
            self.norms.append(make_norm(norm, width, 0, of=linear, activation="relu", **(options or {})))
            inputs = width
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.read_out = he_linear(stream, inputs, classes, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Score a batch of any shape with the samples first."""
        return cast(Tensor, self.read_out(self.features(x)))

    def features(self, x: Tensor) -> Tensor:
        """Return what the read-out is given."""
        h = x.flatten(1)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            h = self.dropout(norm(linear(h)))
        return h
