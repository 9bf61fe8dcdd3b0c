"""Ranks that skip a layer, run it in another mode, end or die: what the others say, and how soon.

Run by torchrun on three ranks. Each scenario has a group of its own, which it breaks.
"""

import json
import os
import pathlib
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import batchnorm as bn

TIMEOUT = 6.0
X = torch.randn(4, 4, 3)


class Net(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.one = bn.SyncBatchNorm(4, process_group=group)
        self.two = bn.SyncBatchNorm(4, process_group=group)

    def forward(self, x):
        return self.two(self.one(x))


def trained(ranks=None):
    """A network that has done one step well."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT))
    model = Net(group)
    model(X.clone().requires_grad_()).sum().backward()
    return model


def waits(function):
    """The error of the rank, and after how many seconds it came."""
    began = time.monotonic()
    try:
        function()
    except bn.BatchNormError as error:
        return {"message": str(error), "seconds": time.monotonic() - began}
    return {"message": "", "seconds": 0.0}


def skips(model, rank):
    if rank == 1:
        model.one(X)
        return None  # to the barrier, where it waits for the others
    return waits(lambda: model(X))


def evaluates(model, rank):
    if rank == 1:
        model.one(X)
        model.two.eval()(X)
        return None  # to the barrier, where it waits for the others
    return waits(lambda: model(X))


def no_backward(model, rank):
    y = model(X.clone().requires_grad_())
    if rank == 1:
        return None  # to the barrier, where it waits for the others
    return waits(lambda: y.sum().backward())


def dies(model, rank):
    if rank == 1:
        model.one(X)
        time.sleep(0.5)  # the others are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    return waits(lambda: model(X))


def ends(model, rank):
    if rank == 2:
        sys.exit(0)
    time.sleep(1.5)
    return waits(lambda: model(X))


def main(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others when one dies, which is what we look at
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    path = pathlib.Path(folder, f"rank{rank}.json")
    found = {}
    models = {scenario.__name__: trained() for scenario in (skips, evaluates, no_backward, dies)}
    pair = trained([0, 2]) if rank != 1 else dist.new_group([0, 2], timeout=timedelta(seconds=TIMEOUT))
    for scenario in (skips, evaluates, no_backward, dies):
        found[scenario.__name__] = scenario(models[scenario.__name__], rank)
        path.write_text(json.dumps(found))
        if scenario is not dies:
            dist.barrier()
    if rank != 1:
        found["ends"] = ends(pair, rank)
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
