"""Training steps of whole networks, each contender in a process of its own, taking turns.

In one process all contenders share one heap: what one of them frees is there for the next, and the page faults that a
training script of its own would meet at every step are not seen. Here each has its own memory, as it has in a user's
script; a step runs in one process while the others sleep.
"""

import multiprocessing
import resource
import time

import torch

import batchnorm as bn
from batchnorm.records import Measurement
from batchnorm.transforms.layout import in_layout
from networks import MobileNetV2, ResNet18, training_step, without_norms

SUBJECTS = {"ResNet-18, 32x32": (ResNet18, 32), "MobileNetV2, 64x64": (MobileNetV2, 64)}
LAYOUTS = ("contiguous", "channels_last")
KEPT = ", freed memory kept"
REST = 0.02  # s before a turn: OpenMP's threads of the one before go on spinning for a while


def contender(pipe, subject, layout, name, batch, threads):
    """Be one contender: make the network, then run a step whenever asked to, and say how long it took."""
    torch.set_num_threads(threads)
    if name.endswith(KEPT):
        bn.keep_freed_memory()
    kind, size = SUBJECTS[subject]
    torch.manual_seed(0)
    model = in_layout(kind(), layout)
    x, target = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if name.startswith("fused"):
        model, _ = bn.fuse(model, x)
    elif name.startswith("without"):
        model = without_norms(model)
    step = training_step(model, x, target)
    pipe.send("ready")
    while pipe.recv():
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        step()
        pipe.send((time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def take_turns(subject, names, batch, threads, steps, warm_up=4):
    """Time the steps of all contenders, {name: [(seconds, page faults)]}; ``names`` are pairs of layout and kind."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, samples = {}, [], {name: [] for name in names}
    try:
        for layout, kind in names:
            pipes[layout, kind], theirs = context.Pipe()
            processes.append(
                context.Process(target=contender, args=(theirs, subject, layout, kind, batch, threads), daemon=True)
            )
            processes[-1].start()
            assert pipes[layout, kind].recv() == "ready"
        for index in range(warm_up + steps):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(REST)
                pipes[name].send(True)
                sample = pipes[name].recv()
                if index >= warm_up:
                    samples[name].append(sample)
    finally:
        for process in processes:
            process.terminate()
    return samples


def train_apart(only, batch, threads, steps):
    """Time and print; return the samples as records."""
    records = []
    kinds = ("torch", "torch" + KEPT, "fused", "fused" + KEPT, "without BN (the limit)" + KEPT)
    for subject in SUBJECTS:
        if only not in subject:
            continue
        print(f"\n{subject}, batch {batch}, {threads} threads, every contender in its own process", flush=True)
        samples = take_turns(subject, [(lay, kind) for lay in LAYOUTS for kind in kinds], batch, threads, steps)
        times = {name: Measurement("time", {}, tuple(t for t, _ in found), "s") for name, found in samples.items()}
        for (layout, kind), found in times.items():
            bases = {"": ("contiguous", "torch")} if layout == "contiguous" else {
                "": (layout, "torch"), " contiguous": ("contiguous", "torch")}  # fmt: skip
            ratios = "   ".join(f"{_ratio(times[base], found)} torch{word}" for word, base in bases.items())
            faults = sorted(n for _, n in samples[layout, kind])[steps // 2]
            print(f"  {layout + ', ' + kind:<52}{1e3 * found.median:7.0f} ms {faults:7d} page faults   {ratios}")
            setting = {"subject": subject, "layout": layout, "contender": kind, "apart": True}
            records.append(Measurement("time", setting, found.samples, "s"))
    return records


def _ratio(base, found):
    """How many times as fast as the base: the median of the ratios of neighbours, and their quartiles."""
    pairs = Measurement("ratio", {}, tuple(a / b for a, b in zip(base.samples, found.samples, strict=True)))
    return f"{pairs.median:.2f}x ({pairs.quantile(0.25):.2f}-{pairs.quantile(0.75):.2f})"
