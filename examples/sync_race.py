"""Train the race's network with the batch spread over processes, and compare with one process that has it all.

    torchrun --nproc-per-node 4 examples/sync_race.py --check

Every step takes the same 32 digits that `batchnorm race` would give a member of this seed; each rank gets its share of
them. With ``--check`` rank 0 afterwards trains the same network alone on the whole batches, twice: in the same order,
and with the samples of each batch reversed, which changes nothing but the rounding. The second tells how far apart
rounding alone drives two runs of one process: in float32 the curves are one for a few steps, until a value near zero
falls on the other side of a ReLU or a maximum, and then differ as much as the reversed run does. With ``--double``
they stay one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn
from batchnorm.lab.data import digits
from batchnorm.lab.networks.inception import Inception, torch_norm
from batchnorm.lab.train import batches

FIRST = 4  # steps, of those compared


def network(seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the race's network, with torch's plain Batch Normalization."""
    return Inception([seed], norm=torch_norm).to(dtype)


def train(
    model: nn.Module, options: argparse.Namespace, share: slice = slice(None), reverse: bool = False
) -> list[float]:
    """Train on a share of every batch; return the loss of every step, the mean over this share."""
    data = digits.load()
    images = torch.from_numpy(data.train_images).to(options.dtype)
    labels = torch.from_numpy(data.train_labels)
    optimiser = torch.optim.SGD(model.parameters(), options.rate)
    losses = []
    for chosen in itertools.islice(batches(options.seed, len(labels), options.batch_size), options.steps):
        mine = (chosen.flip(0) if reverse else chosen)[share]
        loss = F.cross_entropy(model(images[mine])[:, 0], labels[mine])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def accuracy(model: nn.Module, dtype: torch.dtype) -> float:
    """Validate with the running statistics."""
    data = digits.load()
    model.eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(data.validation_images).to(dtype))[:, 0]
    return (scores.argmax(1) == torch.from_numpy(data.validation_labels)).double().mean().item()


def furthest(a: Tensor, b: list[float]) -> tuple[float, float]:
    """Return how far two curves part, over the first steps and over all."""
    apart = (a - torch.tensor(b, dtype=torch.float64)).abs()
    return apart[:FIRST].max().item(), apart.max().item()


def main() -> None:
    """Train on all ranks, then compare on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate; 0.5 is the race's BN-x5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    parser.add_argument("--json", help="write the differences to this file as well")
    options = parser.parse_args()
    options.dtype = torch.float64 if options.double else torch.float32

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.batch_size % size:
        raise SystemExit(f"--batch-size {options.batch_size} cannot be shared equally by {size} ranks")

    model, report = bn.convert(network(options.seed, options.dtype), "sync")
    ddp = DistributedDataParallel(model)
    each = options.batch_size // size
    losses = torch.tensor(train(ddp, options, slice(rank * each, (rank + 1) * each)), dtype=torch.float64)
    dist.all_reduce(losses)
    losses /= size

    if rank == 0:
        print(f"{size} ranks, {len(report.changes)} synchronised layers, {each} samples on each")
        for step in [*range(0, options.steps, max(1, options.steps // 8)), options.steps - 1]:
            print(f"  step {step + 1:4d}  loss {losses[step]:.6f}")
        print(f"  validation accuracy {accuracy(model, options.dtype):.4f}")
        if options.check:
            alone = network(options.seed, options.dtype)
            curve = train(alone, options)
            turned = train(network(options.seed, options.dtype), options, reverse=True)
            apart = furthest(losses, curve)
            noise = furthest(torch.tensor(curve, dtype=torch.float64), turned)
            print(f"one process: validation accuracy {accuracy(alone, options.dtype):.4f}")
            print(f"largest difference in loss        first {FIRST} steps   all {options.steps} steps")
            print(f"  {size} ranks and one process       {apart[0]:10.1e}     {apart[1]:10.1e}")
            print(f"  one process, batches reversed {noise[0]:10.1e}     {noise[1]:10.1e}")
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps({"apart": apart, "noise": noise}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
