"""Beta: how far a BN layer's output is moved after it was normalised: mean, least and largest over channels."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal


def read(signal: Signal) -> Reading | None:
    """Read beta of the layer that the signal arrives at.

    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(2)
    >>> layer.bias.data = torch.tensor([0.5, 2.5])
    >>> read(Signal("bn", layer, "batch norm", "input", torch.zeros(3, 2))).samples
    (1.5, 0.5, 2.5)
    """
    beta = getattr(signal.module, "bias", None)
    if signal.at != "input" or not isinstance(signal.module, _BatchNorm) or not isinstance(beta, Tensor):
        return None
    found = beta.detach().double()
    return Reading((float(found.mean()), float(found.min()), float(found.max())))


QUANTITY = Quantity("beta", "signal", read)
