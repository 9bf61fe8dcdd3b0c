"""Effective learning rate: lr / ||w||^2.

In front of batch norm the length of a weight does not change the function, but the gradient is as 1 / ||w||: a step of
plain SGD turns the weight by as much as a step at this rate would turn one of length 1.
"""

from __future__ import annotations

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Weights


def read(weights: Weights) -> Reading | None:
    """Divide the learning rate of the layer's weights by their squared norm.

    >>> import torch
    >>> read(Weights("fc", {"weight": torch.full((2, 2), 2.0)}, learning_rate=0.8)).samples
    (0.05,)
    """
    norm = weights.norm
    if norm is None or weights.learning_rate is None:
        return None
    return Reading((weights.learning_rate / norm**2 if norm else float("inf"),))


QUANTITY = Quantity("effective learning rate", "weights", read)
