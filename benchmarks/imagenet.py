"""What a step of the paper's Inception takes here: images per second, peak memory, and how fast images are decoded.

    python benchmarks/imagenet.py [--batch 32] [--steps 3] [--runs 3] [--variants bn-x5] [--json imagenet.json]

The full network (11.2M parameters) trains by `batchnorm.lab.imagenet.train` on 64 generated JPEGs of 256 to 500 pixels:
one process, and two under torchrun, each on one thread with a batch of its own. The first step of a run is left
out. Images per core second are those of the processor time of all processes: a machine that does other work as
well stretches the seconds, and hardly these. Peak memory is the resident set of the largest process. FLOPs are counted
by torch.utils.flop_counter.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from batchnorm.lab.imagenet.examples import Crops, open_folder
from batchnorm.lab.imagenet.order import EpochPlace
from batchnorm.lab.imagenet.settings import ImageNetSettings
from batchnorm.lab.imagenet.train import run
from batchnorm.lab.imagenet.variants import VARIANTS

IMAGES = 64


class Clock:
    """A recorder that keeps the seconds of every step, by the wall and of processors, and saves nothing."""

    threads = 1

    def __init__(self):
        self.seconds, self.used = [], []

    def restored(self):
        return None

    def log(self, step, **values):
        if "seconds" in values:
            self.seconds.append(values["seconds"])
            self.used.append(time.process_time())

    def progress(self, done, total, note=""):
        pass

    def due(self):
        return False

    def save(self, step, tensors, **facts):
        pass


def generate(root):
    """Write JPEGs as large as ImageNet's, with something in them for the decoder to do."""
    stream = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(IMAGES if part == "train" else 2):
            place = root / part / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            width, height = map(int, stream.integers(256, 501, 2))
            coarse = stream.integers(0, 256, (height // 8, width // 8, 3)).astype(np.uint8)
            smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), float)
            pixels = np.clip(smooth + stream.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.jpg", quality=90)


def work(options):
    """Train in this process, one of one or of several; print what was measured, on the first."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    clock = Clock()
    run(options, clock)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    used = torch.tensor(np.diff(clock.used))
    if several:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        dist.all_reduce(used)
    if not several or dist.get_rank() == 0:
        print(json.dumps({"seconds": clock.seconds[1:], "used": used.tolist(), "peak": float(peak)}))
    if several:
        dist.destroy_process_group()


def measure(options, processes):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [__file__, "--worker", json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    wall, used = (options["batch"] / statistics.median(found[name]) for name in ("seconds", "used"))
    return wall, used, found["peak"]


def decoding(folder):
    """Return the images per core second that are decoded, cropped and distorted."""
    crops = Crops(open_folder(folder), ImageNetSettings(variant="inception"))
    begun = time.process_time()
    for number in range(len(crops)):
        crops[EpochPlace(0, number)]
    return len(crops) / (time.process_time() - begun)


def flops(variant):
    """Return the floating point operations of one image: forward, and forward with backward."""
    model = ImageNetSettings(variant=variant).network(1000)
    found = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            loss = model(torch.randn(2, 3, 224, 224)).sum()
            if backward:
                loss.backward()
        found.append(counter.get_total_flops() / 2)
    return found


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="of each process")
    parser.add_argument("--steps", type=int, default=3, help="measured, after a first one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--variants", default="bn-x5")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    cores = len(os.sched_getaffinity(0))
    found = {"cores": cores, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        found["decoded"] = [decoding(folder) for _ in range(options.runs)]
        print("decoded by one core, images/s:", *(f"{rate:.0f}" for rate in found["decoded"]), flush=True)
        for variant in VARIANTS:
            forward, both = flops(variant)
            found[f"flops {variant}"] = [forward, both]
            print(f"{variant}: {forward / 1e9:.3f} GFLOP forward, {both / 1e9:.3f} with backward, an image", flush=True)
        for variant in options.variants.split(","):
            for number in range(options.runs):
                for processes in (1, 2):
                    given = {"variant": variant, "data": folder, "batch": options.batch * processes, "log_every": 1}
                    given |= {"steps": 1 + options.steps, "validate_every": 10**6}
                    rate, used, peak = measure(given, processes)
                    load = os.getloadavg()[0]
                    found["runs"].append([variant, processes, number, rate, used, peak, load])
                    print(
                        f"{variant}, {processes} process{'es' * (processes > 1)}, batch {given['batch']}: "
                        f"{rate:.2f} images/s, {used:.2f} a core second, {peak:.0f} MB a process (load {load:.0f})",
                        flush=True,
                    )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
