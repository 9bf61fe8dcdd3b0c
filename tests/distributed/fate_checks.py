"""Three ranks for each way in which ranks can fail; without torchrun, so that rank 0 keeps the store.

Every rank trains; in the second step something happens to some of them. What the others report is written to files.
All ranks of all scenarios are forked from one process, which has imported torch before.
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

TIMEOUT = 15.0
X = torch.randn(4, 4)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def raised():
    raise RuntimeError("no more\n::error::disk")


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def finished():
    sys.exit(0)


def slow():
    time.sleep(TIMEOUT + 6)


# What happens, to which ranks; and the ranks that report it later, when the first have ended already.
SCENARIOS = {
    "killed": (killed, [1], []),
    "killed, and one finds out late": (killed, [1], [2]),
    "killed, the keeper of the store": (killed, [0], []),
    "killed, the keeper of the store, and one finds out late": (killed, [0], [2]),
    "killed, two": (killed, [0, 1], []),
    "raised": (raised, [2], []),
    "raised, the keeper of the store": (raised, [0], []),
    "stopped": (stopped, [1], []),
    "finished": (finished, [2], []),
    "slow": (slow, [1], []),
}


def evaluates(rank, group):
    """Rank 1 evaluates from the start, while the others train."""
    layer = bn.SyncBatchNorm(4, process_group=group)
    if rank == 1:
        layer.eval()
        until = time.monotonic() + TIMEOUT + 2
        while time.monotonic() < until:
            layer(X)
            time.sleep(0.05)
        return None
    return outcome(lambda: layer(X))


def goes_on(rank, group, end=lambda: None):
    """Rank 1 evaluates one batch, and goes on to the gradients' reduction, which fails when the others give up."""
    layer = bn.SyncBatchNorm(4, process_group=group)
    layer(X)
    if rank == 1:
        layer.eval()(X)
        try:
            dist.all_reduce(torch.zeros(4), group=group)
        finally:
            end()
    return outcome(lambda: layer(X))


def goes_on_and_is_killed(rank, group):
    return goes_on(rank, group, killed)


def apart(rank, group):
    """Ranks 0 and 2 share a layer; rank 2 is killed, and rank 1, which is in no group with it, goes on."""
    pair = dist.new_group([0, 2], timeout=timedelta(seconds=TIMEOUT))
    if rank == 1:
        bn.SyncBatchNorm(4)
        time.sleep(5)
        return None
    layer = bn.SyncBatchNorm(4, process_group=pair)
    layer(X)
    if rank == 2:
        time.sleep(1.5)
        killed()
    return outcome(lambda: layer(X))


def outcome(function):
    began = time.monotonic()
    try:
        function()
    except bn.BatchNormError as error:
        return {"message": str(error), "seconds": time.monotonic() - began}
    return {"message": "", "seconds": time.monotonic() - began}


def fails(name, rank, group):
    what, victims, late = SCENARIOS[name]
    model = nn.Sequential(bn.SyncBatchNorm(4, process_group=group))
    model(X)
    time.sleep(1.5)  # by now every rank knows where the others run
    if rank in victims:
        time.sleep(0.5)  # the others are waiting by then
        what()
    if rank in late:
        time.sleep(4)
    return outcome(lambda: model(X))


OTHERS = {
    "evaluates": evaluates,
    "evaluates, and goes on": goes_on,
    "evaluates, and is killed": goes_on_and_is_killed,
    "apart": apart,
}
NAMES = (*SCENARIOS, *OTHERS)


def main(name, rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    found = OTHERS[name](rank, group) if name in OTHERS else fails(name, rank, group)
    pathlib.Path(folder, f"{name} {rank}.json").write_text(json.dumps(found))
    if name == "slow" and rank == 0:
        time.sleep(3)  # the store goes with this rank: the others ask before
    if name in SCENARIOS and SCENARIOS[name][2]:
        os._exit(0)  # so that those who find out late find it ended


def start(name, rank, folder, port):
    """Fork a rank; the child goes on to the end of this file and ends like any program."""
    child = os.fork()
    if child == 0:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        main(name, rank, folder)
        sys.exit(0)
    return child


if __name__ == "__main__":
    folder, *ports = sys.argv[1:]
    children = {}
    for name, port in zip(NAMES, ports, strict=True):
        for rank in range(3):
            children[name, rank] = start(name, rank, folder, port)
    pathlib.Path(folder, "pids.json").write_text(json.dumps({f"{n} {r}": pid for (n, r), pid in children.items()}))
    until = time.monotonic() + 60
    while children and time.monotonic() < until:
        for (name, rank), child in [*children.items()]:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                del children[name, rank]
        for name, (what, victims, _) in SCENARIOS.items():
            if what is stopped and {rank for other, rank in children if other == name} <= set(victims):
                for rank in victims:
                    if (name, rank) in children:
                        os.kill(children[name, rank], signal.SIGKILL)
        time.sleep(0.05)
    for child in children.values():
        os.kill(child, signal.SIGKILL)
