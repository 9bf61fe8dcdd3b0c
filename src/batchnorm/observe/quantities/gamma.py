"""Gamma: how far a BN layer's output is stretched after it was normalised: mean, least and largest over channels."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal


def read(signal: Signal) -> Reading | None:
    """Read gamma of the layer that the signal arrives at.

    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(2)
    >>> layer.weight.data = torch.tensor([0.5, 2.5])
    >>> read(Signal("bn", layer, "batch norm", "input", torch.zeros(3, 2))).samples
    (1.5, 0.5, 2.5)
    """
    gamma = getattr(signal.module, "weight", None)
    if signal.at != "input" or not isinstance(signal.module, _BatchNorm) or not isinstance(gamma, Tensor):
        return None
    found = gamma.detach().double()
    return Reading((float(found.mean()), float(found.min()), float(found.max())))


QUANTITY = Quantity("gamma", "signal", read)
