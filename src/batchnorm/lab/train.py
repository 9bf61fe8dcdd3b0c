"""The stacked training loop: plain SGD, each member with its own learning rate, weights and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data.digits import Split
from batchnorm.lab.networks.inception import Inception

VALIDATION_CHUNK = 150


@dataclass(frozen=True)
class Progress:
    """Where a stack stands, for whoever watches."""

    step: int
    best_accuracy: float


def batches(seed: int, examples: int, size: int) -> Iterator[Tensor]:
    """Give indices of mini-batches without end, shuffled anew every epoch, incomplete batches left out.

    >>> order = batches(seed=1, examples=10, size=4)
    >>> [len(next(order)) for _ in range(3)]
    [4, 4, 4]
    """
    # Its own kind of generator: the torch streams that draw the weights start from the same seed.
    random = np.random.default_rng(seed)
    while True:
        whole = examples - examples % size
        yield from torch.from_numpy(random.permutation(examples)[:whole]).view(-1, size)


def check_batch(size: int, examples: int) -> None:
    """Raise for a batch of more examples than there are.

    >>> check_batch(64, examples=50)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: the batch size is 64 but there are 50 examples to train on; give a smaller number
    """
    if size > examples:
        raise BatchNormError(
            f"the batch size is {size} but there are {examples} examples to train on", do="give a smaller number"
        )


def train(
    network: Inception,
    members: Sequence[Member],
    data: Split,
    *,
    steps: int,
    batch_size: int = 32,
    every: int = 25,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Curve]:
    """Train a stack and return a curve for each member.

    >>> members = [Member(0.1, seed=0), Member(0.2, seed=1)]
    >>> curves = train(Inception([0, 1]), members, digits.load(), steps=500)  # doctest: +SKIP

    A member whose loss stops being finite is marked as diverged and set to zero; the others do not notice.
    """
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    orders = [batches(member.seed, len(labels), batch_size) for member in members]
    parameters = list(network.parameters())
    rates = torch.tensor([member.learning_rate for member in members], dtype=parameters[0].dtype)
    diverged: list[int | None] = [None] * len(members)
    rows: list[tuple[int, Tensor, Tensor]] = []
    total, count, best = torch.zeros(len(members)), 0, 0.0

    for step in range(1, steps + 1):
        chosen = torch.stack([next(order) for order in orders], dim=1)
        losses = member_losses(network(images[chosen].flatten(1, 2)), labels[chosen])
        # Each loss depends on its own member only: the gradient of the sum is every member's own gradient.
        gradients = torch.autograd.grad(losses.sum(), parameters)
        descend(parameters, gradients, rates)
        total, count = total + losses.detach(), count + 1
        for index in torch.nonzero(~torch.isfinite(losses)).flatten().tolist():
            if diverged[index] is None:
                diverged[index] = step
                rates[index] = 0.0
        clear(network, [index for index, at in enumerate(diverged) if at == step])
        if step % every == 0 or step == steps:
            gone = torch.tensor([at is not None for at in diverged])
            accuracy = validate(network, data).masked_fill(gone, math.nan)
            rows.append((step, accuracy, (total / count).masked_fill(gone, math.nan)))
            total, count = torch.zeros(len(members)), 0
            best = max(best, accuracy.nan_to_num(0.0).max().item())
        watch(Progress(step, best))
    return [
        Curve(
            member,
            tuple(step for step, _, _ in rows),
            tuple(accuracy[index].item() for _, accuracy, _ in rows),
            tuple(loss[index].item() for _, _, loss in rows),
            diverged[index],
        )
        for index, member in enumerate(members)
    ]


def member_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Give each member's mean cross-entropy: scores are (count, members, classes), labels (count, members).

    >>> member_losses(torch.zeros(4, 2, 10), torch.zeros(4, 2, dtype=torch.int64)).exp().round()
    tensor([10., 10.])
    """
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(0)


@torch.no_grad()
def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rates: Tensor) -> None:
    """Take one step of SGD in place, every member at its own rate.

    >>> weights = torch.zeros(4)
    >>> descend([weights], [torch.ones(4)], rates=torch.tensor([1.0, 2.0]))
    >>> weights
    tensor([-1., -1., -2., -2.])
    """
    members = len(rates)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.view(members, -1).sub_(rates[:, None] * gradient.reshape(members, -1))


@torch.no_grad()
def clear(network: Inception, members: Sequence[int]) -> None:
    """Set a member's parameters and statistics to zero, so that a stack holds finite numbers only.

    >>> clear(network, members=[3])  # doctest: +SKIP
    """
    for tensor in (*network.parameters(), *network.buffers()) if members else ():
        if tensor.dim() > 0:
            tensor.view(network.members, -1)[list(members)] = 0.0


@torch.no_grad()
def validate(network: Inception, data: Split) -> Tensor:
    """Give each member's validation accuracy with population statistics: the running averages.

    >>> validate(Inception([0, 1]), digits.load()).shape  # doctest: +SKIP
    torch.Size([2])
    """
    network.eval()
    images, labels = torch.from_numpy(data.validation_images), torch.from_numpy(data.validation_labels)
    right = torch.zeros(())
    for start in range(0, len(labels), VALIDATION_CHUNK):
        chosen = slice(start, start + VALIDATION_CHUNK)
        scores = network(images[chosen].repeat(1, network.members, 1, 1))
        right = right + (scores.argmax(2) == labels[chosen, None]).sum(0)
    network.train()
    return right / len(labels)
