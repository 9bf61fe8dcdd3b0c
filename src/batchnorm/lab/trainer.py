"""The training loop of many copies: SGD with each copy's own rate, momentum, schedule, clipping and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member, best_accuracy
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.ensemble import Single, Stack
from batchnorm.lab.train import Progress, batches, check_batch

CHUNK = 450  # validation samples that are scored at once
DIGITS = 6  # of accuracies and losses, so that records are short and read back as they were

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""How the learning rate goes down, as a factor of the share of steps that are done."""


def train(
    stack: Stack,
    members: Sequence[Member],
    data: Examples,
    *,
    steps: int,
    batch_size: int = 32,
    every: int = 10,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Curve]:
    """Train all copies of a stack and return a curve for each; the trained state is in the stack.

    >>> members = [Member(0.1, seed=0), Member(0.3, seed=1, momentum=0.9)]
    >>> stack = Copies([Residual(member.seed, blocks=2) for member in members])  # doctest: +SKIP
    >>> curves = train(stack, members, digits_examples(), steps=500)  # doctest: +SKIP

    A copy is trained exactly as `torch.optim.SGD` would train it alone. One whose loss is not finite is marked as
    diverged and leaves the stack, so that it costs no more time; the others do not notice.
    """
    check_schedules(members)
    order = orders(members, len(data.train_labels), batch_size, steps)
    alive = list(range(len(members)))
    first = stack.parameters[0]
    velocities = [torch.zeros_like(p) for p in stack.parameters] if any(m.momentum for m in members) else []
    accuracies: list[list[float]] = [[] for _ in members]
    losses_seen: list[list[float]] = [[] for _ in members]
    diverged: list[int | None] = [None] * len(members)
    evaluated: list[int] = []
    total, count, best = torch.zeros(len(members), dtype=torch.float64), 0, 0.0
    for step in range(1, steps + 1):
        if alive:
            chosen = order[alive, step - 1]
            losses = copy_losses(stack.scores(data.train_inputs[chosen]), data.train_labels[chosen])
            gradients = stack.gradients(losses)
            own = [members[index] for index in alive]
            clip(gradients, own)
            if velocities:
                add_momentum(gradients, velocities, own, first=step == 1)
            descend(stack.parameters, gradients, rates(own, (step - 1) / steps, first.dtype))
            losses = losses.detach()
            total[alive] += losses.double()
            lost = ~torch.isfinite(losses)
            if bool(lost.any()):
                for place in torch.nonzero(lost).flatten().tolist():
                    diverged[alive[place]] = step
                kept = torch.nonzero(~lost).flatten()
                stack.keep(kept)
                velocities = [velocity[kept] for velocity in velocities]
                alive = [alive[place] for place in kept.tolist()]
        count += 1
        if step % every == 0 or step == steps:
            evaluated.append(step)
            right = validate(stack, data) if alive else []
            for row in (accuracies, losses_seen):
                for values in row:
                    values.append(math.nan)
            for place, index in enumerate(alive):
                accuracies[index][-1] = round(right[place], DIGITS)
                losses_seen[index][-1] = float(f"{total[index].item() / count:.{DIGITS}g}")
                best = max(best, right[place])
            total, count = torch.zeros_like(total), 0
        watch(Progress(step, best))
    return [
        Curve(member, tuple(evaluated), tuple(accuracies[index]), tuple(losses_seen[index]), diverged[index])
        for index, member in enumerate(members)
    ]


def train_apart(
    networks: Sequence[nn.Module],
    members: Sequence[Member],
    data: Examples,
    *,
    steps: int,
    watch: Callable[[Progress], None] = lambda progress: None,
    **amounts: int,
) -> list[Curve]:
    """Train networks one after the other, without stacking them: large ones gain nothing from it.

    >>> members = [Member(0.1, seed) for seed in (0, 1)]
    >>> curves = train_apart([Residual(0), Residual(1)], members, digits_examples(), steps=500)  # doctest: +SKIP

    ``watch`` sees the mean step of all, and the best accuracy of any.
    """
    curves: list[Curve] = []
    for done, (network, member) in enumerate(zip(networks, members, strict=True)):
        before = max(map(best_accuracy, curves), default=0.0)

        def look(progress: Progress, done: int = done, before: float = before) -> None:
            best = max(before, progress.best_accuracy)
            watch(Progress((done * steps + progress.step) // len(members), best))

        curves += train(Single(network), [member], data, steps=steps, watch=look, **amounts)
    return curves


def check_schedules(members: Sequence[Member]) -> None:
    """Raise for a schedule that does not exist.

    >>> check_schedules([Member(0.1, 0, schedule="steep")])
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no schedule 'steep'; choose one of constant, linear, cosine
    """
    for member in members:
        if member.schedule not in SCHEDULES:
            raise BatchNormError(
                f"there is no schedule {member.schedule!r}", do=f"choose one of {', '.join(SCHEDULES)}"
            )


def orders(members: Sequence[Member], examples: int, batch_size: int, steps: int) -> Tensor:
    """Return the indices of every copy's batches: (copies, steps, batch size).

    >>> orders([Member(0.1, 0), Member(0.2, 0)], examples=10, batch_size=4, steps=3).shape
    torch.Size([2, 3, 4])
    """
    check_batch(batch_size, examples)
    by_seed = {
        seed: torch.stack(list(islice(batches(seed, examples, batch_size), steps)))
        for seed in {member.seed for member in members}
    }
    return torch.stack([by_seed[member.seed] for member in members])


def copy_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each copy's mean cross-entropy: scores are (copies, batch, ..., classes), labels (copies, batch, ...).

    >>> copy_losses(torch.zeros(2, 4, 10), torch.zeros(2, 4, dtype=torch.int64)).exp().round()
    tensor([10., 10.])
    """
    losses = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1)


def rates(members: Sequence[Member], done: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return each copy's learning rate when this share of the steps is done.

    >>> rates([Member(0.5, 0), Member(0.5, 0, schedule="linear")], done=0.75)
    tensor([0.5000, 0.1250])
    """
    return torch.tensor([m.learning_rate * SCHEDULES[m.schedule](done) for m in members], dtype=dtype)


def clip(gradients: list[Tensor], members: Sequence[Member]) -> None:
    """Scale the gradients of copies in place whose norm, over all parameters, is above their ``clip``.

    >>> gradients = [torch.tensor([[3.0, 4.0], [3.0, 4.0]])]
    >>> clip(gradients, [Member(0.1, 0, clip=1.0), Member(0.1, 0)])
    >>> gradients
    [tensor([[0.6000, 0.8000],
            [3.0000, 4.0000]])]
    """
    if all(member.clip is None for member in members):
        return
    parts = [torch.linalg.vector_norm(gradient.reshape(len(members), -1), dim=1) for gradient in gradients]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    largest = torch.tensor([math.inf if m.clip is None else m.clip for m in members], dtype=norms.dtype)
    factors = (largest / norms).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(along(factors, gradient))


def add_momentum(gradients: list[Tensor], velocities: list[Tensor], members: Sequence[Member], *, first: bool) -> None:
    """Add each copy's momentum to its gradients in place, as `torch.optim.SGD` does.

    >>> gradients, velocities = [torch.ones(2, 1)], [torch.ones(2, 1)]
    >>> add_momentum(gradients, velocities, [Member(0.1, 0, momentum=0.5), Member(0.1, 0)], first=False)
    >>> gradients[0].flatten()
    tensor([1.5000, 1.0000])
    """
    momenta = torch.tensor([0.0 if first else m.momentum for m in members], dtype=gradients[0].dtype)
    for gradient, velocity in zip(gradients, velocities, strict=True):
        velocity.mul_(along(momenta, velocity)).add_(gradient)
        gradient.copy_(velocity)


@torch.no_grad()
def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rates: Tensor) -> None:
    """Take one step in place, every copy at its own rate.

    >>> weights = torch.zeros(2, 2)
    >>> descend([weights], [torch.ones(2, 2)], rates=torch.tensor([1.0, 2.0]))
    >>> weights
    tensor([[-1., -1.],
            [-2., -2.]])
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.addcmul_(gradient, along(rates, gradient), value=-1)


def along(values: Tensor, like: Tensor) -> Tensor:
    """Shape one value for each copy so that it multiplies that copy's part of a tensor.

    >>> along(torch.ones(3), torch.ones(3, 4, 5)).shape
    torch.Size([3, 1, 1])
    """
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


@torch.no_grad()
def validate(stack: Stack, data: Examples) -> list[float]:
    """Return each copy's validation accuracy in evaluation mode: with the running statistics.

    >>> validate(stack, data)  # doctest: +SKIP
    [0.91, 0.93]
    """
    labels = data.validation_labels
    right = sum(
        (stack.evaluate(data.validation_inputs[start : start + CHUNK]).argmax(-1) == labels[start : start + CHUNK])
        .flatten(1)
        .sum(1)
        for start in range(0, len(labels), CHUNK)
    )
    assert isinstance(right, Tensor)
    return [float(n) / labels.numel() for n in right.tolist()]
