"""Without torchrun rank 0 keeps the store. A group is destroyed and started again; then rank 0 dies."""

import json
import os
import pathlib
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import batchnorm as bn


def main(folder):
    layer, x = bn.SyncBatchNorm(4), torch.randn(4, 4)
    for start in range(2):
        # Long enough for a rank that starts late: the timeout is also that of the first meeting.
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        layer(x)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        # Whoever is quicker than rank 0 would meet the store that is about to end.
        ended = pathlib.Path(folder, f"ended{start}")
        if rank == 0:
            ended.touch()
        while not ended.exists():
            time.sleep(0.01)
    print("silence ends here", flush=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    layer(x)
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        layer(x)
    except bn.BatchNormError as error:
        found = {"message": str(error), "seconds": time.monotonic() - began}
        pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
