"""``FilterResponseNorm``: each filter's response over its own magnitude, and a rectifier with a learned corner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.layers.channel_norms import PerChannel, along, mean_square, wide
from batchnorm.layers.options import Activation


class FilterResponseNorm(PerChannel):
    """FRN with its thresholded linear unit: ``max(gamma * x / sqrt(nu2 + eps) + beta, tau)``.

    >>> layer = FilterResponseNorm(16)
    >>> y = layer(torch.randn(1, 16, 5, 5))  # one example is enough: there are no statistics of a batch
    >>> [name for name, _ in layer.named_parameters()]
    ['weight', 'bias', 'tau']

    Singh & Krishnan, "Filter Response Normalization Layer" (2019). ``nu2`` is the mean of ``x ** 2`` over the
    positions, for each sample and channel. No mean is subtracted, so the values may lie far from zero, where a plain
    ReLU would pass all of them or none: hence ``tau``, learned for each channel.

    The threshold is the layer's activation. It stands where a ReLU would: ``activation=None`` and
    ``activation="relu"`` both mean the threshold; any other name (none, relu6, leaky_relu, silu) takes its place.
    ``threshold=True`` or ``False`` overrules that. ``forward(x, residual=r)`` adds ``r`` before it.

    Where there is one position (1x1, or fully connected), ``x / sqrt(x ** 2 + eps)`` is the sign of ``x`` unless
    ``eps`` is of the size of ``x ** 2``; there the layer needs ``learn_eps=True``, the paper's
    ``eps + |learned_eps|`` with a scalar that starts at 1e-4, and raises without it.
    """

    tau: nn.Parameter | None
    learned_eps: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        affine: bool = True,
        learn_eps: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        threshold: bool | None = None,
        activation: Activation | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__(
            num_features, affine, affine, device, dtype, activation=activation, negative_slope=negative_slope
        )
        self.eps = eps
        if threshold is None:
            threshold = activation in (None, "relu")
            if threshold:
                self.activation = None
        start = torch.zeros(num_features, device=device, dtype=dtype)
        self.register_parameter("tau", nn.Parameter(start) if threshold else None)
        scalar = torch.empty(1, device=device, dtype=dtype)
        self.register_parameter("learned_eps", nn.Parameter(scalar) if learn_eps else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin again: gamma 1, beta 0, tau 0 (a ReLU), the learned eps 1e-4.

        >>> layer = FilterResponseNorm(2)
        >>> _ = layer.tau.data.fill_(3.0)
        >>> layer.reset_parameters()
        >>> layer.tau.tolist()
        [0.0, 0.0]
        """
        super().reset_parameters()
        if self.tau is not None:
            nn.init.zeros_(self.tau)
        if self.learned_eps is not None:
            nn.init.constant_(self.learned_eps, 1e-4)

    def _normalize(self, input: Tensor) -> Tensor:
        self._check(input)
        x = wide(input)
        positions = list(range(2, x.dim()))
        eps: Tensor | float = self.eps
        if self.learned_eps is not None:
            eps = eps + self.learned_eps.abs()
        elif torch._C._get_tracing_state() is None and all(x.shape[axis] == 1 for axis in positions):
            raise BatchNormError(
                f"an input of shape {list(x.shape)} has one position, and a value over its own magnitude is its sign",
                where=type(self).__name__,
                do="make the layer with learn_eps=True",
            )
        scale = torch.rsqrt(mean_square(x, positions) + eps)
        if self.weight is not None:
            scale = scale * along(self.weight, x)  # before it meets x, which is large
        z = x * scale
        shift: Tensor | None = self.bias
        if self.tau is not None:
            # max(z, tau) as relu(z - tau) + tau: a third of the time, since torch's maximum has a slow backward.
            shift = -self.tau if shift is None else shift - self.tau
        return z if shift is None else z + along(shift, x)

    def _activate(self, z: Tensor) -> Tensor:
        if self.tau is not None:
            z = torch.relu(z) + along(self.tau, z)
        return super()._activate(z)

    def _details(self) -> list[str]:
        details = [f"eps={self.eps}"]
        if self.learned_eps is not None:
            details.append("learn_eps=True")
        return details if self.tau is not None else [*details, "threshold=False"]
