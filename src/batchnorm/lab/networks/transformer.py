"""A small transformer that predicts the next character at every place, with any norm of the family."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.layers.family import make_norm


class Transformer(nn.Module):
    """Embeddings, blocks of causal self-attention and a perceptron with a norm before each, a norm, a linear read-out.

    >>> Transformer(seed=0, norm="layer", characters=5, length=8)(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 8, 5])

    ``norm`` is a name of `batchnorm.make_norm`; it is given (batch x places, channels), so that "batch" averages over
    all places of all examples, as `torch.nn.BatchNorm1d` does, the later ones included. Weights are Gaussian with
    variance 1 / fan-in, those into the residual smaller; the same ones whatever the norm.
    """

    def __init__(
        self,
        seed: int,
        *,
        norm: str,
        characters: int,
        length: int,
        width: int = 32,
        blocks: int = 2,
        heads: int = 2,
    ) -> None:
        """Draw the weights from the seed."""
        super().__init__()
        self.heads, self.count = heads, blocks
        stream = torch.Generator().manual_seed(seed)

        def drawn(outputs: int, inputs: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(outputs, inputs, generator=stream) * scale / math.sqrt(inputs))

        small = 1 / math.sqrt(2 * blocks)
        self.characters, self.places = drawn(characters, width, 0.5), drawn(length, width, 0.5)
        self.mixing = nn.ParameterList(drawn(3 * width, width) for _ in range(blocks))
        self.joining = nn.ParameterList(drawn(width, width, small) for _ in range(blocks))
        self.widening = nn.ParameterList(drawn(4 * width, width) for _ in range(blocks))
        self.narrowing = nn.ParameterList(drawn(width, 4 * width, small) for _ in range(blocks))
        self.read_out = drawn(characters, width)
        self.norms = nn.ModuleList(make_norm(norm, width, 0) for _ in range(2 * blocks + 1))
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Score every character at every place of (batch, places)."""
        h = F.embedding(x, self.characters) + self.places[: x.shape[1]]
        for block in range(self.count):
            h = h + self.attention(block, self.normed(2 * block, h))
            wide = F.relu(F.linear(self.normed(2 * block + 1, h), self.widening[block]))
            h = h + F.linear(wide, self.narrowing[block])
        return F.linear(self.normed(2 * self.count, h), self.read_out)

    def normed(self, index: int, h: Tensor) -> Tensor:
        """Apply a norm to the channels of all places."""
        return cast(Tensor, self.norms[index](h.flatten(0, 1))).view_as(h)

    def attention(self, block: int, h: Tensor) -> Tensor:
        """Mix the places, each with those before it."""
        batch, places, width = h.shape
        shape = (batch, places, 3, self.heads, width // self.heads)
        query, key, value = F.linear(h, self.mixing[block]).view(shape).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width / self.heads)
        later = cast(Tensor, self.later)[:places, :places]
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        return F.linear(mixed.transpose(1, 2).reshape(batch, places, width), self.joining[block])
