"""Inference with whole networks: as they were, compiled, folded, and folded in the runtimes that are installed."""

import copy
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import batchnorm as bn
from batchnorm.transforms.outputs import difference
from batchnorm.transforms.timing import measure
from networks import MobileNetV2, PreActResNet18, ResNet18

SUBJECTS = {
    "ResNet-18, 32x32": (ResNet18, 32),
    "MobileNetV2, 64x64": (MobileNetV2, 64),
    "pre-activation ResNet-18, 32x32": (PreActResNet18, 32),  # half of whose BN layers cannot be folded
}


def with_statistics(model):
    """BN layers that have seen something: with means of 0 and variances of 1 a fold would show nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor, low in ((module.running_mean, -0.5), (module.running_var, 0.5), (module.weight, 0.5),
                                    (module.bias, -0.5)):  # fmt: skip
                    tensor.copy_(low + torch.rand(tensor.shape, generator=generator))
    return model.eval()


def of_torch(model, x):
    def run():
        with torch.inference_mode():
            return model(x)

    return run


def by_fx(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.fx.experimental.optimization import fuse

        return fuse(model)


def of_onnxruntime(file, x, threads):
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    name, given = session.get_inputs()[0].name, x.numpy()
    return lambda: torch.from_numpy(session.run(None, {name: given})[0])


def of_openvino(file, x, threads):
    import openvino

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
    # Otherwise it computes in bfloat16 where the processor can, and the comparison is not one.
    compiled = core.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    given = x.numpy()
    return lambda: torch.from_numpy(compiled([given])[0])


def contenders(model, x, threads, folder):
    """Every way to run the model, by name; what is not installed, or fails, is named and left out."""
    folded, report = bn.fold(model, x)
    print(f"  folded {len(report.paths)} of {len(report.paths) + len(report.left)} BN layers; {report.certificate}")
    ways = {
        "torch, eager": lambda: of_torch(model, x),
        "torch.compile": lambda: of_torch(torch.compile(copy.deepcopy(model)), x),
        "torch.fx's fuse": lambda: of_torch(by_fx(model), x),
        "folded": lambda: of_torch(folded, x),
        "folded, channels_last": lambda: of_torch(
            copy.deepcopy(folded).to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        ),
        "folded, torch.compile": lambda: of_torch(torch.compile(copy.deepcopy(folded)), x),
    }
    file = Path(folder) / "model.onnx"
    for package, make in (("onnxruntime", of_onnxruntime), ("openvino", of_openvino)):
        if find_spec(package) is None or find_spec("onnxscript") is None:
            print(f"  {package} is not installed")
            continue
        if not file.exists():
            bn.export(model, x, file)
        ways[f"folded, {package}"] = lambda make=make: make(file, x, threads)
    found, expected = {}, of_torch(model, x)()
    for name, make in ways.items():
        try:
            run = make()
            _, apart = difference([expected], [run()])
        except Exception as error:  # no compiler, a model that cannot be traced, ...
            print(f"  {name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        if apart > 1e-3:
            print(f"  {name} gives other outputs, by {apart:.1g} of the largest")
        found[name] = run
    return found


def infer(only, batch, threads, steps):
    """Time every way, taking turns, and print medians with quartiles; return the samples."""
    records = []
    for name, (kind, size) in SUBJECTS.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model, x = with_statistics(kind()), torch.randn(batch, 3, size, size)
        print(f"\n{name}, batch {batch}, {threads} threads, inference")
        with tempfile.TemporaryDirectory() as folder:
            times = measure(contenders(model, x, threads, folder), steps, warm_up=3)
        first = times[0]
        for found in times:
            ratios = sorted(a / b for a, b in zip(first.samples, found.samples, strict=True))
            low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
            quarters = [1e3 * found.quantile(q) for q in (0.5, 0.25, 0.75)]
            print(
                f"  {found.setting['contender']:<28} {quarters[0]:8.2f} ms ({quarters[1]:.2f} to {quarters[2]:.2f})   "
                f"{middle:.2f}x eager ({low:.2f} to {high:.2f})"
            )
            records.append(type(found)("time", {"subject": name, "inference": True, **found.setting}, found.samples,
                                       "s"))  # fmt: skip
    return records
