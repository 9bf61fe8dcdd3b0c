"""Gradient norm: the Euclidean length of the gradient of all parameters a layer itself holds, as the optimiser sees it.

Gradients that were accumulated over several passes, clipped or unscaled before the step are measured as they then are.
"""

from __future__ import annotations

from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Weights, norm


def read(weights: Weights) -> Reading | None:
    """Measure the gradients.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> read(Weights("fc", {"weight": weight})).samples
    (5.0,)
    """
    gradients = [p.grad for p in weights.parameters.values() if p.grad is not None]
    found = norm([g.to_dense() if g.is_sparse else g for g in gradients])
    return None if found is None else Reading((found,))


QUANTITY = Quantity("gradient norm", "gradients", read)
