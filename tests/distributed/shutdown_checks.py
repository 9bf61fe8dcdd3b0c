"""One of two ranks dies under torchrun, as it would in a user's training: nothing is done about signals here."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import batchnorm as bn


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    model, _ = bn.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "sync")
    model(torch.randn(5, 3)).sum().backward()
    if dist.get_rank() == 1:
        time.sleep(1.0)  # the other is waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(5, 3))


if __name__ == "__main__":
    main()
