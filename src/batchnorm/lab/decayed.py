"""SGD of many copies with weight decay on some of the weights: what the claims about the norm of weights train with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from batchnorm.lab.data.examples import Examples
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.networks.layered import Layered
from batchnorm.lab.networks.normed import normed
from batchnorm.lab.train import batches
from batchnorm.lab.trainer import along, copy_losses
from batchnorm.layers.batch import BatchNorm1d

Rates = Callable[[int], Tensor]


def invariant(seed: int, *, width: int = 32, layers: int = 2, init: str = "lecun", classes: int = 10) -> Layered:
    """Return a network for 64 inputs of which all that learns is invariant to its scale: weights in front of BN.

    >>> [name for name, p in invariant(0).named_parameters() if p.requires_grad]
    ['linears.0.weight', 'linears.1.weight']

    BN has no gamma and no beta, and the read-out stays as it was drawn.
    """
    norm = partial(BatchNorm1d, affine=False)
    network = normed(
        seed, norm, init=init, activation="relu", inputs=64, width=width, layers=layers, classes=classes
    )  # fmt: skip
    network.linears[-1].requires_grad_(False)
    return network


def noisy_batches(
    data: Examples, seeds: Sequence[int], size: int, noise: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs (copies, batch, ...) and labels, each copy in its seed's order; some labels are drawn anew.

    >>> from batchnorm.lab.data import sets
    >>> from batchnorm.lab.data.examples import examples
    >>> x, labels = next(noisy_batches(examples(sets.load("digits"), flat=True), seeds=(0, 0), size=4))
    >>> x.shape, bool((labels[0] == labels[1]).all())
    (torch.Size([2, 4, 64]), True)

    ``noise`` is the share of labels that are replaced by random ones, others at every visit.
    """
    orders = {seed: batches(seed, len(data.train_labels), size) for seed in seeds}
    streams = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
    while True:
        chosen = {seed: next(order) for seed, order in orders.items()}
        labels = {seed: data.train_labels[index] for seed, index in chosen.items()}
        for seed, stream in streams.items() if noise else ():
            drawn = torch.randint(data.classes, (size,), generator=stream)
            labels[seed] = torch.where(torch.rand(size, generator=stream) < noise, drawn, labels[seed])
        yield torch.stack([data.train_inputs[chosen[s]] for s in seeds]), torch.stack([labels[s] for s in seeds])


def decayed(
    stack: Copies,
    stream: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    rates: Rates,
    *,
    decays: Tensor | None = None,
    momenta: Tensor | None = None,
    hidden: Callable[[str], bool] = lambda name: True,
    others: Tensor | None = None,
    watch: Callable[[int], None] = lambda step: None,
) -> None:
    """Train all copies of a stack by SGD as `torch.optim.SGD` does; ``watch(step)`` after each step.

    >>> stack = Copies([invariant(0), invariant(1)])
    >>> decayed(stack, stream, 100, lambda step: torch.full((2,), 0.1), decays=torch.full((2,), 1e-3))  # doctest: +SKIP

    ``rates(step)``, with steps from 0, ``decays`` and ``momenta`` hold a number for each copy, for the parameters whose
    names are ``hidden``; the rest has the rates ``others``, no decay and no momentum.
    """
    names, parameters = list(stack.named), stack.parameters
    velocities = [torch.zeros_like(p) for p in parameters] if momenta is not None else []
    for step in range(steps):
        x, labels = next(stream)
        gradients = stack.gradients(copy_losses(stack.scores(x), labels))
        now = rates(step)
        with torch.no_grad():
            for index, (name, parameter, gradient) in enumerate(zip(names, parameters, gradients, strict=True)):
                if not hidden(name):
                    parameter.sub_(gradient * along(now if others is None else others, gradient))
                    continue
                change = gradient if decays is None else gradient + parameter * along(decays, parameter)
                if momenta is not None:
                    velocities[index].mul_(along(momenta, change)).add_(change)
                    change = velocities[index]
                parameter.sub_(change * along(now, change))
        watch(step + 1)


def as_vectors(tensors: Sequence[Tensor]) -> Tensor:
    """Return each copy's weights as one vector: (copies, numbers).

    >>> as_vectors([torch.ones(2, 3, 4), torch.ones(2, 5)]).shape
    torch.Size([2, 17])
    """
    return torch.cat([tensor.detach().flatten(1) for tensor in tensors], 1)


def angles(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Return the angle by which each tensor of each copy turned: (tensors, copies), exact for small angles.

    >>> angles([torch.tensor([[1.0, 0.0]])], [torch.tensor([[0.0, 2.0]])]) / math.pi
    tensor([[0.5000]])
    """
    rows = []
    for one, other in zip(before, after, strict=True):
        a, b = (nn.functional.normalize(tensor.detach().double().flatten(1), dim=1) for tensor in (one, other))
        rows.append(2 * torch.asin(((a - b).norm(dim=1) / 2).clamp(max=1.0)))
    return torch.stack(rows).float()
