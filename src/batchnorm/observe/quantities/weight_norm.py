"""Weight norm: the Euclidean length of a layer's weights (parameters of two axes and more), before the step."""

from __future__ import annotations

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Weights


def read(weights: Weights) -> Reading | None:
    """Measure the weights.

    >>> import torch
    >>> read(Weights("fc", {"weight": torch.full((2, 2), 2.0), "bias": torch.ones(2)})).samples
    (4.0,)
    """
    norm = weights.norm
    return None if norm is None else Reading((norm,))


QUANTITY = Quantity("weight norm", "weights", read)
