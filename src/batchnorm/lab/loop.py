"""A plain training loop of one network, for experiments whose batches or losses are their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.lab.train import batches
from batchnorm.layers.switches import use_batch_statistics

Tick = Callable[[], None]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch.

    >>> round(float(cross_entropy(nn.Identity(), torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64))), 3)
    2.303
    """
    return F.cross_entropy(network(x), y)


def drawn(x: Tensor, y: Tensor, *, seed: int, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield mini-batches, shuffled anew every epoch, incomplete ones left out; the same ones for a seed.

    >>> [len(x) for x, _ in drawn(torch.zeros(10, 2), torch.zeros(10), seed=0, size=4, steps=3)]
    [4, 4, 4]
    """
    for index in islice(batches(seed, len(y), size), steps):
        yield x[index], y[index]


def fit(
    network: nn.Module,
    stream: Iterable[tuple[Tensor, Tensor]],
    *,
    rate: float | Callable[[int], float],
    momentum: float = 0.9,
    decay: float = 0.0,
    loss: Loss = cross_entropy,
    tick: Tick = lambda: None,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train by SGD in training mode, a step for each batch; return the losses. A loss that is not finite ends it.

    >>> data = drawn(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64), seed=0, size=16, steps=5)
    >>> len(fit(nn.Linear(4, 2), data, rate=0.1))
    5

    ``rate`` may be a function of the steps that are done. ``after`` is called with the number of each step when it is
    done; it may leave the network in evaluation mode.
    """
    rate_at = rate if callable(rate) else lambda done: rate
    optimizer = torch.optim.SGD(network.parameters(), rate_at(0), momentum, weight_decay=decay)
    losses: list[float] = []
    for done, (x, y) in enumerate(stream):
        optimizer.param_groups[0]["lr"] = rate_at(done)
        network.train()
        optimizer.zero_grad()
        found = loss(network, x, y)
        losses.append(float(found.detach()))
        if not math.isfinite(losses[-1]):
            break
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after(done + 1)
        tick()
    return losses


@torch.no_grad()
def right(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in evaluation mode, in which the network is left.

    >>> right(nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 0]))
    0.75
    """
    return float((network.eval()(x).argmax(1) == y).double().mean())


@torch.no_grad()
def right_by_batch(network: nn.Module, x: Tensor, y: Tensor, size: int) -> float:
    """Return the accuracy when each batch, of neighbours, is normalised by its own statistics; nothing is updated.

    >>> right_by_batch(nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 0]), size=2)
    0.75
    """
    network.eval()
    whole = len(y) - len(y) % size  # a short last batch would have statistics of another quality
    with use_batch_statistics(network):
        found = [network(x[start : start + size]).argmax(1) for start in range(0, whole, size)]
    return float((torch.cat(found) == y[:whole]).double().mean())
