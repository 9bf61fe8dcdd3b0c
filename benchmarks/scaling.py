"""Measure synchronised statistics on 2, 4 and 8 processes of this machine, beside the model of docs/scaling.md.

    python benchmarks/scaling.py --json scaling.json

The driver starts the ranks itself; contenders alternate in every process. A figure is the lower quartile of the
repetitions, because on a shared machine the upper ones measure the neighbours.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

CHANNELS = (16, 64, 256, 1024)
RANKS = (2, 4, 8)


def rank_main(folder, repeats):
    import torch
    import torch.distributed as dist
    from torch import nn

    import batchnorm as bn
    from batchnorm.distributed.exchange import _all_gather, gather
    from batchnorm.distributed.ledger import FORWARD, CallEntry, ledger_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, size = dist.group.WORLD, dist.get_world_size()

    def timed(functions):
        """Seconds of each, alternating; all ranks begin each repetition together."""
        samples = {name: [] for name in functions}
        for index in range(repeats + 5):
            for name, function in functions.items():
                dist.barrier()
                began = time.perf_counter()
                function()
                if index >= 5:
                    samples[name].append(time.perf_counter() - began)
        return samples

    found = {}
    for channels in CHANNELS:
        layer, plain = bn.SyncBatchNorm(channels), nn.BatchNorm2d(channels)
        ours = bn.BatchNorm2d(channels)
        seat = ledger_of(group).seat(layer, channels)
        vector = torch.randn(1 + 2 * channels, dtype=torch.float64)
        rows = torch.empty(size * vector.numel(), dtype=torch.float64)
        x = torch.randn(8, channels, 14, 14, requires_grad=True)
        dy = torch.randn_like(x)

        def exchange(vector=vector, seat=seat):
            gather(vector, CallEntry(seat, 1, FORWARD), group)

        def ring(rows=rows, vector=vector):
            _all_gather(rows, vector, group)

        def reduce(vector=vector):
            dist.all_reduce(vector.clone())

        def step(layer, x=x, dy=dy):
            torch.autograd.grad(layer(x), x, dy)

        found[channels] = timed(
            {
                "exchange": exchange,
                "all_gather": ring,
                "all_reduce": reduce,
                "SyncBatchNorm": lambda layer=layer, step=step: step(layer),
                "BatchNorm2d": lambda ours=ours, step=step: step(ours),
                "torch": lambda plain=plain, step=step: step(plain),
            }
        )
    if dist.get_rank() == 0:
        pathlib.Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks, repeats):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr"]
        command += ["127.0.0.1", "--master-port", port, __file__, "--folder", folder, "--repeats", str(repeats)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(pathlib.Path(folder, "found.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", help="write the samples here")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        return rank_main(options.folder, options.repeats)

    from batchnorm.bench.collectives import RESNET50, Machine, fit, payload, step
    from batchnorm.records import Measurement, RecordFile

    cluster = Machine(start=50e-6, message=10e-6, byte=0.8e-9)  # assumed: ordinary servers, 10 Gb/s
    measurements = []
    quartile = {}
    for ranks in RANKS:
        for channels, contenders in launch(ranks, options.repeats).items():
            for name, samples in contenders.items():
                setting = {"ranks": ranks, "channels": int(channels), "contender": name}
                measurement = Measurement("time", setting, tuple(samples), "s")
                measurements.append(measurement)
                quartile[ranks, int(channels), name] = measurement.quantile(0.25)

    print("\nmicroseconds (lower quartile)")
    names = ("exchange", "all_gather", "all_reduce", "SyncBatchNorm", "BatchNorm2d", "torch")
    print(f"{'ranks':>5} {'channels':>8} " + " ".join(f"{name:>13}" for name in names))
    for ranks in RANKS:
        for channels in CHANNELS:
            row = " ".join(f"{1e6 * quartile[ranks, channels, name]:13.0f}" for name in names)
            print(f"{ranks:5d} {channels:8d} {row}")
    cores = len(os.sched_getaffinity(0))
    print("\nthe model, fitted to 2 and 4 ranks, and what it says of 8")
    machines = []
    for channels in CHANNELS:
        size = payload(channels)[0]
        machine = fit({r: quartile[r, channels, "exchange"] for r in (2, 4)}, size, 0.0, cores)
        machines.append(machine)
        predicted, measured = machine.exchange(8, size), quartile[8, channels, "exchange"]
        print(
            f"{channels:8d} channels: start {1e6 * machine.start:.0f} us, message {1e6 * machine.message:.0f} us; "
            f"8 ranks: {1e6 * predicted:.0f} us predicted, {1e6 * measured:.0f} us measured"
        )
    here = [statistics.median(getattr(machine, name) for machine in machines) for name in ("start", "message")]
    print(
        "\nextrapolated: milliseconds that a training step of a ResNet-50 spends on 106 exchanges, one rank per machine"
    )
    print(f"{'ranks':>5} {'this host':>10} {'a cluster':>10} {'its ring':>10} {'its tree':>10}")
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 1000):
        row = [step(Machine(*here, 0.0), ranks, RESNET50)]
        row += [step(cluster, ranks, RESNET50, way) for way in ("exchange", "ring", "tree")]
        print(f"{ranks:5d} " + " ".join(f"{1e3 * seconds:10,.0f}" for seconds in row))
    if options.json:
        RecordFile("scaling", {"repeats": options.repeats}, tuple(measurements)).write(options.json)
    return None


if __name__ == "__main__":
    main()
