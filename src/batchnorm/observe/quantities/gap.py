"""Gap: how far the statistics of this batch are from the running ones, which evaluation will use.

Two numbers, each the root mean square over channels: by how many running standard deviations the batch's mean is off,
and the logarithm of the batch's variance over the running variance. The running statistics are those before this batch
moved them. Near zero, evaluation sees what training saw.
"""

from __future__ import annotations

from torch import Tensor

from batchnorm.moments import distance
from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal


def read(signal: Signal) -> Reading | None:
    """Compare the statistics of a BN layer's input with its running statistics.

    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(1, eps=0.0)
    >>> x = torch.tensor([[0.0], [4.0], [2.0]])  # mean 2, variance 4
    >>> [round(sample, 4) for sample in read(Signal("bn", layer, "batch norm", "input", x)).samples]
    [2.0, 1.3863]
    """
    mean, var = (getattr(signal.module, name, None) for name in ("running_mean", "running_var"))
    known = isinstance(mean, Tensor) and isinstance(var, Tensor) and mean.shape == signal.moments.mean.shape
    if not known or signal.at != "input":
        return None
    assert isinstance(mean, Tensor)
    assert isinstance(var, Tensor)
    own, eps = signal.moments, float(getattr(signal.module, "eps", 0.0))
    count = own.count.double()
    unbiased = own.var * (count / (count - 1).clamp(min=1))  # as the running variance is
    mean, var = mean.detach().to(own.mean), var.detach().to(own.mean)
    return Reading(tuple(map(float, distance(own.mean, unbiased, mean, var, eps))))


QUANTITY = Quantity("gap", "signal", read)
