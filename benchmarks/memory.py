"""Memory of a training step: what layers and whole networks keep for the backward pass, and the peak of a step.

    python benchmarks/memory.py [--batch 32] [--runs 3] [--json memory.json]

What is kept is counted: the distinct memory that autograd saves between forward and backward, without parameters and
buffers. The peak is the resident memory of a process of its own during three steps (zero_grad, forward, backward, SGD
with momentum), above what that process had before the network was made. It needs Linux.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.records import Measurement, RecordFile
from networks import MobileNetV2, ResNet18, training_step

NETWORKS = {"ResNet-18, 64x64": (ResNet18, 64), "MobileNetV2, 96x96": (MobileNetV2, 96)}
SHAPE = 32, 64, 56, 56


def saved(model, x, **arguments):
    """Return the bytes that autograd keeps for the backward pass, each piece once, without those of the model."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no later tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, **arguments)
    return sum(storage.nbytes() for storage in seen.values())


class Stock(nn.Module):
    """BN, an optional sum and ReLU of torch."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x, residual=None):
        y = self.norm(x)
        return F.relu(y if residual is None else y + residual)


def layers():
    """Count what BN + ReLU and BN + add + ReLU keep, ours and torch's."""
    records = []
    for name, with_residual in (("BN + ReLU", False), ("BN + add + ReLU", True)):
        for contender, layer in (
            ("torch", Stock(SHAPE[1])),
            ("batchnorm", bn.BatchNorm2d(SHAPE[1], activation="relu")),
        ):
            x = torch.randn(SHAPE, requires_grad=True)
            arguments = {"residual": torch.randn(SHAPE, requires_grad=True)} if with_residual else {}
            kept = saved(layer, x, **arguments) / (x.numel() * x.element_size())
            records.append(Measurement("kept for backward", {"layer": name, "contender": contender}, (kept,), "inputs"))
            print(f"{name:16} {contender:10} keeps {kept:.3f} times its input")
    return records


def measure(network, contender, batch):
    """Return the MB kept for the backward pass, and the MB that three steps add at their peak, in a process apart."""
    arguments = [sys.executable, __file__, "--child", network, contender, "--batch", str(batch)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(network, contender, batch):
    before = megabytes("VmRSS")
    kind, size = NETWORKS[network]
    torch.manual_seed(0)
    model, x, target = kind(), torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    if contender == "batchnorm":
        model, _ = bn.fuse(model, x[:4])
    step = training_step(model, x, target)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the preparation freed is not the training's
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(3):
        step()
    peak = megabytes("VmHWM") - before
    print(json.dumps((saved(model, x) / 1e6, peak)))


def megabytes(name):
    """Return a figure of this process in /proc/self/status, in MB: VmRSS is memory in use, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3, help="processes of every contender; the median counts")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child, options.batch)
    records = layers()
    for network in NETWORKS:
        samples = {"torch": [], "batchnorm": []}
        for _ in range(options.runs):
            for contender, found in samples.items():
                found.append(measure(network, contender, options.batch))
        for contender, found in samples.items():
            setting = {"network": network, "contender": contender, "batch": options.batch}
            kept = Measurement("kept for backward", setting, (found[0][0],), "MB")
            peak = Measurement("peak memory of training", setting, tuple(peak for _, peak in found), "MB")
            records += [kept, peak]
            print(f"{network}: {contender:10} keeps {kept.median:.0f} MB, peak {peak.median:.0f} MB of", end=" ")
            print([round(sample) for sample in peak.samples], flush=True)
    if options.json:
        RecordFile("memory", vars(options), tuple(records)).write(options.json)


if __name__ == "__main__":
    main()
