"""A full training step (forward, backward, SGD) of whole networks: stock torch beside batchnorm.accelerate.

    python benchmarks/model.py [--steps 15] [--compile] [--json model.json]
    python benchmarks/model.py --apart [--steps 25]
    python benchmarks/model.py --infer [--steps 50] [--batch 1]

With ``--apart`` every contender has a process, and so a memory, of its own (see apart.py), and freed memory is kept or
not. With ``--infer`` it is inference instead: as the model was, compiled, folded by torch.fx and by batchnorm.fold, and
the folded one in onnxruntime and openvino where they are installed. Otherwise all contenders take turns in one process;
the figures are lower quartiles of the times (of inference: medians with quartiles), and medians of the ratios of
neighbouring steps with their quartiles.
"""

import argparse
import copy

import torch
import torch.nn.functional as F

import batchnorm as bn
from apart import train_apart
from batchnorm.records import RecordFile
from batchnorm.transforms.layout import in_layout
from batchnorm.transforms.timing import measure
from inference import infer
from networks import MobileNetV2, ResNet18, training_step, without_norms

SUBJECTS = {
    "ResNet-18, 32x32": (ResNet18, 32, "contiguous"),
    "MobileNetV2, 64x64": (MobileNetV2, 64, "contiguous"),
    "MobileNetV2, 64x64, channels_last": (MobileNetV2, 64, "channels_last"),
}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a subject's name")
    parser.add_argument("--infer", action="store_true", help="inference in place of training")
    parser.add_argument("--apart", action="store_true", help="every contender in a process of its own")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the stock model and of ours, too")
    parser.add_argument("--json", help="write the samples here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(bn.kernels.describe())
    ways = options.only, options.batch, options.threads, options.steps
    records = infer(*ways) if options.infer else train_apart(*ways) if options.apart else train(options)
    if options.json:
        RecordFile("model", vars(options), tuple(records)).write(options.json)


def train(options):
    """Time training steps and print them; return the samples."""
    records = []
    for name, (kind, size, layout) in SUBJECTS.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        user = in_layout(kind(), layout)
        x, target = torch.randn(options.batch, 3, size, size), torch.randint(10, (options.batch,))
        if layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        faster, report = bn.accelerate(user, x, loss=lambda y, target=target: F.cross_entropy(y, target))
        chosen = report.chosen.partition(", ")[2] or layout
        models = {f"torch, {layout} (as it was)": copy.deepcopy(user)}
        if chosen != layout:
            models[f"torch, {chosen}"] = in_layout(copy.deepcopy(user), chosen)
        if options.compile:
            models["torch.compile"] = torch.compile(copy.deepcopy(user))
            models["fused, torch.compile"] = torch.compile(bn.fuse(user, x)[0])
        models["without BN (the limit)"] = without_norms(in_layout(copy.deepcopy(user), chosen))
        models["accelerate"] = faster
        times = measure({n: training_step(m, x, target) for n, m in models.items()}, options.steps, warm_up=3)
        print(f"\n{name}, batch {options.batch}, {options.threads} threads; chosen: {report.chosen}")
        print(f"  {report.certificate}\n  {report.gradients}")
        ours = times[-1]
        for found in times:
            contender = found.setting["contender"]
            ratios = sorted(a / b for a, b in zip(found.samples, ours.samples, strict=True))
            low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
            print(
                f"  {contender:<34} {1e3 * found.quantile(0.25):8.1f} ms   accelerate is "
                f"{found.quantile(0.25) / ours.quantile(0.25):.2f}x (pairs: {middle:.2f}, {low:.2f} to {high:.2f})"
            )
            records.append(type(found)("time", {"subject": name, **found.setting}, found.samples, "s"))
    return records


if __name__ == "__main__":
    main()
