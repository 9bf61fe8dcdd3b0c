"""The state of a run over processes: what a checkpoint holds, and statistics that each process has of its own.

Without ``sync`` every process normalises its own share of a batch, as in the paper, so their running statistics differ.
Validation uses their mean, which is Algorithm 2's average over mini-batches. A checkpoint holds each of them as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from batchnorm.checkpoints import mismatch
from batchnorm.errors import BatchNormError
from batchnorm.lab.runs.ranks import place

NETWORK, MOMENTUM, STATISTICS = "network.", "momentum.", "statistics"


def summed(numbers: Tensor) -> Tensor:
    """Return the sum over all processes.

    >>> summed(torch.ones(2))
    tensor([1., 1.])
    """
    if place()[1] > 1:
        numbers = numbers.clone()
        dist.all_reduce(numbers)
    return numbers


def running(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of a model.

    >>> len(running(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))))
    4
    """
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flat(model: nn.Module) -> Tensor:
    """Return all running statistics in one float64 vector.

    >>> flat(nn.BatchNorm1d(2))
    tensor([0., 0., 1., 1.], dtype=torch.float64)
    """
    return torch.cat(
        [torch.empty(0, dtype=torch.float64), *(b.detach().double().cpu().flatten() for b in running(model))]
    )


def put(model: nn.Module, numbers: Tensor) -> None:
    """Set all running statistics from such a vector.

    >>> layer = nn.BatchNorm1d(1)
    >>> put(layer, torch.tensor([3.0, 4.0]))
    >>> layer.running_mean, layer.running_var
    (tensor([3.]), tensor([4.]))
    """
    buffers = running(model)
    for buffer, part in zip(buffers, torch.split(numbers, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def of_all(model: nn.Module) -> Tensor:
    """Return the running statistics of every process, a row each."""
    rank, processes = place()
    rows = torch.zeros(processes, len(flat(model)), dtype=torch.float64)
    rows[rank] = flat(model)
    return summed(rows.to(next(model.parameters()).device)).cpu()


@contextmanager
def averaged(model: nn.Module) -> Iterator[None]:
    """Let the model have the mean of all processes' running statistics, for the time of the block.

    >>> with averaged(nn.BatchNorm1d(2)):
    ...     pass
    """
    if place()[1] == 1:
        yield
        return
    own = flat(model)
    put(model, of_all(model).mean(0))
    try:
        yield
    finally:
        put(model, own)


def tensors_of(model: nn.Module, optimizer: SGD) -> dict[str, Tensor]:
    """Return what a checkpoint holds; every process has to call it.

    >>> model = nn.BatchNorm1d(2)
    >>> list(tensors_of(model, SGD(model.parameters(), 0.1)))[:2]
    ['network.weight', 'network.bias']
    """
    with averaged(model):
        held = {NETWORK + name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            held[MOMENTUM + name] = buffer.detach().cpu()
    return {**held, STATISTICS: of_all(model)}


def network_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's part of a checkpoint, under the network's names.

    >>> network_of({"network.weight": torch.ones(1), "momentum.weight": torch.ones(1)})
    {'weight': tensor([1.])}
    """
    return {name.removeprefix(NETWORK): tensor for name, tensor in tensors.items() if name.startswith(NETWORK)}


def put_back(model: nn.Module, optimizer: SGD, tensors: Mapping[str, Tensor]) -> None:
    """Put a checkpoint into a model and its optimizer, with this process's own statistics if it has some of them."""
    own, statistics = network_of(tensors), tensors.get(STATISTICS, torch.empty(0))
    momentum = {name.removeprefix(MOMENTUM): each for name, each in tensors.items() if name.startswith(MOMENTUM)}
    known = {name: parameter for name, parameter in model.named_parameters() if name in momentum}
    wrong = mismatch(own, model.state_dict()) or mismatch(momentum, known)
    if not wrong and statistics.shape[1:] != flat(model).shape:
        wrong = f"statistics are of shape {list(statistics.shape)}"
    if wrong:
        raise BatchNormError(f"its checkpoint is not of this run ({wrong})", do="delete the run")
    model.load_state_dict(own)
    rank, processes = place()
    if len(statistics) == processes:
        put(model, statistics[rank])
    for name, parameter in known.items():
        buffer = torch.empty_like(parameter).copy_(momentum[name])
        optimizer.state[parameter]["momentum_buffer"] = buffer.detach()
