"""The tensors of one cell, the same for all contenders."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchnorm.bench.cases import Case


@dataclass(frozen=True)
class Inputs:
    """What one cell feeds to every contender.

    >>> make_inputs(Case((2, 3), "contiguous", "bn", "train")).x.shape
    torch.Size([2, 3])

    ``x``, ``residual`` and ``grad`` have the case's dtype and layout. The parameters and running statistics
    are float32 whatever the dtype, as in a model under autocast.
    """

    x: torch.Tensor
    residual: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def load_into(self, layer: torch.nn.Module) -> None:
        """Give a layer with torch's state the parameters of this cell.

        >>> inputs = make_inputs(Case((2, 3), "contiguous", "bn", "train"))
        >>> inputs.load_into(torch.nn.BatchNorm1d(3))
        """
        state = layer.state_dict()
        for name in ("weight", "bias", "running_mean", "running_var"):
            state[name].copy_(getattr(self, name))


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random tensors for a case: normal values, weights near one.

    >>> make_inputs(Case((2, 3, 4, 4), "channels_last", "bn", "train")).x.stride()
    (48, 1, 12, 3)
    """
    generator = torch.Generator().manual_seed(seed)
    channels = case.shape[1]

    def activation() -> torch.Tensor:
        values = torch.randn(case.shape, generator=generator).to(getattr(torch, case.dtype))
        return values.contiguous(memory_format=memory_format(case))

    return Inputs(
        x=activation().requires_grad_(),
        residual=activation().requires_grad_(),
        grad=activation(),
        weight=torch.rand(channels, generator=generator) + 0.5,
        bias=torch.randn(channels, generator=generator) * 0.1,
        running_mean=torch.randn(channels, generator=generator) * 0.1,
        running_var=torch.rand(channels, generator=generator) + 0.5,
    )


def memory_format(case: Case) -> torch.memory_format:
    """Torch's name for the layout of a case.

    >>> memory_format(Case((2, 3, 4, 4), "channels_last", "bn", "train"))
    torch.channels_last
    """
    if case.layout == "contiguous":
        return torch.contiguous_format
    return torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d
