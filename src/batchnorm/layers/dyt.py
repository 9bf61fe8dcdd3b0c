"""``DyT``: no statistics, a learned squashing in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.layers.channel_norms import PerChannel, wide
from batchnorm.layers.options import Activation


class DyT(PerChannel):
    """Dynamic Tanh: ``gamma * tanh(alpha * x) + beta``, with one learned ``alpha`` for the layer.

    >>> layer = DyT(16)
    >>> layer(torch.randn(8, 16, 5, 5)).shape, layer.alpha
    (torch.Size([8, 16, 5, 5]), Parameter containing:
    tensor([0.5000], requires_grad=True))

    Zhu et al., "Transformers without Normalization" (2025). Nothing is averaged, so an example never depends on
    another and training is evaluation; large values are squashed instead of divided. It was proposed for
    transformers, in the place of layer norm: with (batch, tokens, channels) say ``channel_axis=-1``. ``alpha``
    starts at ``alpha_start``; the paper finds 0.5 right except for large language models, which want less.

    ``activation`` (none, relu, relu6, leaky_relu, silu) follows, and ``forward(x, residual=r)`` adds ``r`` before it.
    """

    alpha: nn.Parameter

    def __init__(
        self,
        num_features: int,
        alpha_start: float = 0.5,
        affine: bool = True,
        channel_axis: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__(
            num_features, affine, affine, device, dtype, activation=activation, negative_slope=negative_slope
        )
        self.alpha_start, self.channel_axis = alpha_start, channel_axis
        self.alpha = nn.Parameter(torch.full((1,), alpha_start, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Begin again: gamma 1, beta 0, alpha as it started.

        >>> layer = DyT(2, alpha_start=0.25)
        >>> _ = layer.alpha.data.fill_(3.0)
        >>> layer.reset_parameters()
        >>> layer.alpha.item()
        0.25
        """
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_start)

    def _normalize(self, input: Tensor) -> Tensor:
        self._check(input, self.channel_axis)
        return self._affine(torch.tanh(self.alpha * wide(input)), self.channel_axis)

    def _details(self) -> list[str]:
        details = [f"alpha_start={self.alpha_start}"]
        return details if self.channel_axis == 1 else [*details, f"channel_axis={self.channel_axis}"]
