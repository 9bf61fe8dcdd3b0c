"""Small changes of inputs that raise the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pgd(network: nn.Module, x: Tensor, y: Tensor, radius: float, *, steps: int = 10) -> Tensor:
    """Change every number by at most ``radius`` to raise the loss: projected gradient ascent (Madry et al., 2018).

    >>> network = nn.Linear(1, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = network.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    >>> pgd(network, torch.tensor([[3.0]]), torch.tensor([0]), radius=0.5)
    tensor([[2.5000]])

    It begins at ``x`` and takes steps of 2.5 radius / steps along the sign. The network's mode is its own; in training
    mode hold its statistics with `batchnorm.no_update`.
    """
    there = x.detach().clone()
    for _ in range(steps):
        there.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(network(there), y), there)
        moved = there.detach() + 2.5 * radius / steps * slope.sign()
        there = torch.minimum(torch.maximum(moved, x - radius), x + radius)
    return there.detach()
