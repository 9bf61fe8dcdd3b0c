"""``FrozenBatchNorm``: batch normalisation whose statistics, gamma and beta are constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from batchnorm.errors import BatchNormError
from batchnorm.kernels.fallback import activate
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.options import Activation, BiasOption


class FrozenBatchNorm(_BatchNormBase):
    """Normalise with fixed statistics, gamma and beta, in training too; for inputs (N, C, ...) of any dimensions.

    >>> layer = FrozenBatchNorm(3)
    >>> layer.load_state_dict(torch.nn.BatchNorm2d(3).state_dict())
    <All keys matched successfully>
    >>> x = torch.full((4, 3, 2, 2), 2.0)
    >>> bool((layer.train()(x) == layer.eval()(x)).all()), list(layer.parameters())
    (True, [])

    The ``state_dict`` has the keys of BatchNorm's. Dictionaries without ``num_batches_tracked``, as the frozen layers
    of torchvision and detectron2 write them, load strictly. Gamma and beta are buffers, not parameters: no
    optimiser, weight decay or ``model.requires_grad_(True)`` reaches them. To freeze layers that an optimiser already
    holds, and to thaw them later, use `freeze` and `unfreeze`.

    Exported with ``torch.export``, the layer is ``x * scale + shift``, of constants.
    """

    statistics = "running"
    update = False
    seen: int | None = None  # dimensions of the last input, for those who thaw the layer

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        negative_slope: float = 0.01,
        **of_torch: Unpack[BiasOption],
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            True,
            device,
            dtype,
            activation=activation,
            negative_slope=negative_slope,
            statistics="running",
            update=False,
            **of_torch,
        )
        for name in ("weight", "bias"):
            parameter = getattr(self, name)
            delattr(self, name)
            self.register_buffer(name, None if parameter is None else parameter.detach())

    @property
    def learn(self) -> bool:
        """Whether gamma and beta learn: never.

        >>> FrozenBatchNorm(3).learn
        False
        """
        return False

    @learn.setter
    def learn(self, value: bool) -> None:
        if value:
            raise BatchNormError(
                "a FrozenBatchNorm does not learn",
                where=type(self).__name__,
                do="make it a BatchNorm with bn.unfreeze(model)",
            )

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return the two constants of each channel, for ``y = scale * x + shift``, computed in float64.

        >>> FrozenBatchNorm(1, eps=0.0).scale_and_shift()
        (tensor([1.]), tensor([0.]))
        """
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        assert var is not None
        scale = torch.rsqrt(var.double() + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.detach().double()
        shift = -scale * mean.double()
        if self.bias is not None:
            shift = shift + self.bias.detach().double()
        return scale.to(mean.dtype), shift.to(mean.dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalise, add ``residual`` if one is given, apply the layer's activation.

        >>> FrozenBatchNorm(8, activation="relu")(torch.randn(4, 8, 6)).min() >= 0
        tensor(True)
        """
        if torch.compiler.is_exporting() and mask is None:
            shape = [1, -1, *[1] * (input.dim() - 2)]
            scale, shift = (constant.reshape(shape) for constant in self.scale_and_shift())
            z = input * scale + shift
            z = z if residual is None else z + residual
            return activate(z, self.activation or "none", self.negative_slope).to(input.dtype)
        y = super().forward(input, residual, mask)
        if not torch.compiler.is_compiling() and isinstance(input, Tensor) and self.seen != input.dim():
            self.seen = input.dim()
        return y

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = prefix + "num_batches_tracked"
        if key not in state_dict:
            state_dict[key] = torch.tensor(0) if self.num_batches_tracked is None else self.num_batches_tracked
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Show the settings that the class's name does not imply.

        >>> FrozenBatchNorm(2, activation="relu").extra_repr()
        "2, eps=1e-05, affine=True, activation='relu'"
        """
        words = [f"{self.num_features}, eps={self.eps}, affine={self.affine}"]
        words += [
            f"{name}={getattr(self, name)!r}"
            for name in ("activation", "negative_slope", "statistics", "update")
            if getattr(self, name) != getattr(FrozenBatchNorm, name)
        ]
        return ", ".join(words)
