"""oneDNN's Batch Normalization primitives beside our kernel and our layer, taking turns in one process.

    pip install -c constraints.txt '.[onednn]'
    python benchmarks/onednn.py [--shapes 32x64x56x56,128x1024] [--rounds 15] [--json onednn.json]
    python benchmarks/onednn.py --library ~/build/libdnnl.so     # another version than the one on PyPI

A step is a forward pass in training and a backward pass. oneDNN and `kernel` write to memory that was allocated before;
`layer` is what a user calls: it allocates its outputs, and autograd records it. All share torch's threads: oneDNN's
library asks for libgomp.so.1, and torch, imported first, has loaded it. Before it is timed, every contender is compared
with the definition in float64.
"""

import argparse
import ctypes
import ctypes.util
import math
import sys
from pathlib import Path

import torch

import batchnorm as bn
from batchnorm import kernels, reference
from batchnorm.bench import cases as grid
from batchnorm.bench.inputs import make_inputs
from batchnorm.bench.measure import alternate, ratio
from batchnorm.kernels import native
from batchnorm.records import Measurement, RecordFile

OPERATIONS = ("bn", "bn+relu")
FLOAT32, TRAINING, BACKWARD, WORKSPACE = 3, 64, 128, 135  # as dnnl_types.h has them
SCALE_AND_SHIFT, RELU = 0x2 | 0x4, 0x8
SRC, DST, MEAN, VARIANCE, SCALE, SHIFT, NOTES = 1, 17, 49, 50, 51, 52, 64
DIFF_SRC, DIFF_DST, DIFF_SCALE, DIFF_SHIFT = 129, 145, 255, 256


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default="", help="such as 32x64x56x56,1024x512")
    parser.add_argument("--layouts", default=",".join(grid.LAYOUTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", help="libdnnl.so; by default that of this environment, or of the system")
    parser.add_argument("--json", help="write the samples here")
    options = parser.parse_args()
    library = options.library or find()
    if library is None:
        print("oneDNN is not installed; pip install -c constraints.txt '.[onednn]' installs it")
        return
    onednn = OneDNN(library)
    print(f"oneDNN {onednn.version} beside {bn.kernels.describe()}, {torch.get_num_threads()} threads")
    cells = grid.make_cases(
        grid.parse_shapes(options.shapes) if options.shapes else grid.SHAPES,
        layouts=grid.parse_names(options.layouts, "layouts", grid.LAYOUTS),
        operations=list(OPERATIONS),
        passes=["train"],
    )
    records, gains = [], {}
    for case in cells:
        inputs = make_inputs(case)
        away_from_the_kink(inputs)
        contenders = {"oneDNN": onednn.step, "kernel": bare_kernel, "layer": layer}
        made = {name: make(case, inputs) for name, make in contenders.items()}
        for name, (step, outputs) in made.items():
            compare(name, case, inputs, step, outputs)
        samples = alternate({name: step for name, (step, _) in made.items()}, options.rounds)
        times = {
            name: Measurement("time", {**case.setting(), "contender": name}, values, "s")
            for name, values in samples.items()
        }
        records += times.values()
        found = {name: ratio(times["oneDNN"], times[name]) for name in ("kernel", "layer")}
        for name, value in found.items():
            gains.setdefault((case.layout, case.operation, name), []).append(value)
        print(f"{case.label:40} {times['oneDNN'].median * 1e3:8.3f} ms", end="")
        print(*(f"  {name} {times[name].median * 1e3:8.3f} ms ({found[name]:.2f}x)" for name in found), flush=True)
    for (layout, operation, name), values in gains.items():
        mean, least = math.exp(math.fsum(map(math.log, values)) / len(values)), min(values)
        print(f"{layout}, {operation}: oneDNN's time over that of our {name}: {mean:.2f} ({least:.2f} at least)")
    if options.json:
        RecordFile("onednn", vars(options), tuple(records)).write(options.json)


def find():
    """Where the library is: in this environment, where pip puts it, or on the system."""
    places = [Path(prefix, "lib", "libdnnl.so.3") for prefix in (sys.prefix, sys.base_prefix)]
    return next((str(place) for place in places if place.exists()), ctypes.util.find_library("dnnl"))


def layer(case, inputs):
    """A step of our layer, and where to find its results."""
    norm = bn.BatchNorm1d if inputs.x.dim() < 4 else bn.BatchNorm2d
    module = norm(case.shape[1], activation="relu" if case.operation == "bn+relu" else None)
    inputs.load_into(module)
    x, results = inputs.x.detach().requires_grad_(), {}

    def step():
        x.grad = module.weight.grad = module.bias.grad = None
        y = module(x)
        y.backward(inputs.grad)
        results.update(y=y, dx=x.grad, dweight=module.weight.grad, dbias=module.bias.grad)

    return step, lambda: results


def bare_kernel(case, inputs):
    """The kernel alone, on memory that is there."""
    x, channels = inputs.x, case.shape[1]
    rows = case.layout == "channels_last" or x.dim() == 2
    like = (x.numel() // channels, channels, 1) if rows else (x.shape[0], channels, x.shape[2:].numel())
    y, dx = torch.empty_like(x), torch.empty_like(x)
    saved, dweight, dbias = torch.empty(5 * channels), torch.empty(channels), torch.empty(channels)
    count = torch.zeros((), dtype=torch.int64)
    mean, var = inputs.running_mean.clone(), inputs.running_var.clone()
    activation = int(case.operation == "bn+relu")
    both = (0, activation, 0, torch.get_num_threads(), *like, 1, like[0], 0, x.data_ptr(), 0)
    parameters = (inputs.weight.data_ptr(), inputs.bias.data_ptr())
    numbers = (1e-5, 0.1, 0.0, 0.0, 0.0)
    there = native.pack_arguments(
        native.TRAIN, *both, 0, 0, y.data_ptr(), 0, *parameters, mean.data_ptr(), var.data_ptr(), count.data_ptr(),
        saved.data_ptr(), 0, 0, 0, 0, *numbers,
    )  # fmt: skip
    back = native.pack_arguments(
        native.BACKWARD_TRAIN, *both, inputs.grad.data_ptr(), 0, dx.data_ptr(), 0, *parameters, 0, 0, 0,
        saved.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), 0, 0, *numbers,
    )  # fmt: skip
    run, held = kernels.kernel().run, (mean, var, count, saved, inputs)

    def step():
        run(there)
        run(back)
        return held

    return step, lambda: {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def away_from_the_kink(inputs):
    """No gradient where the input of ReLU is 0 but for rounding: there each implementation may have its own."""
    x, weight, bias = (tensor.detach().double().numpy() for tensor in (inputs.x, inputs.weight, inputs.bias))
    near = abs(reference.batch_norm_forward(x, weight, bias).y) < 1e-5
    inputs.grad[torch.from_numpy(near)] = 0


def compare(name, case, inputs, step, outputs):
    """Raise if a step's results are not those of the definition in float64."""
    step()
    x, dy, gamma, beta = (
        each.detach().double().numpy() for each in (inputs.x, inputs.grad, inputs.weight, inputs.bias)
    )
    activation = "relu" if case.operation == "bn+relu" else "none"
    gradients = reference.batch_norm_backward(dy, x, gamma, beta, activation=activation)
    right = {
        "y": reference.batch_norm_forward(x, gamma, beta, activation=activation).y,
        "dx": gradients.dx, "dweight": gradients.dgamma, "dbias": gradients.dbeta,
    }  # fmt: skip
    for key, value in right.items():
        error = abs(outputs()[key].detach().double().numpy() - value).max() / abs(value).max()
        if not error < 1e-4:
            raise SystemExit(f"{case.label}: {key} of {name} differs by {error:.1e} of the largest value")


# ---- oneDNN's C interface -------------------------------------------------------------------------------------------


class _Argument(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("memory", ctypes.c_void_p)]


class OneDNN:
    """The library, with one engine and one stream."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        self.library.dnnl_memory_desc_get_size.argtypes = [ctypes.c_void_p]
        self.library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self.library.dnnl_version.restype = ctypes.POINTER(ctypes.c_int)
        self.version = ".".join(str(self.library.dnnl_version()[i]) for i in range(3))
        self.engine = self._made("dnnl_engine_create", ctypes.c_int(1), ctypes.c_size_t(0))  # a CPU
        self.stream = self._made("dnnl_stream_create", self.engine, ctypes.c_uint(1))  # in order

    def _called(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise SystemExit(f"oneDNN: {name} returns {status}")

    def _made(self, name, *arguments):
        made = ctypes.c_void_p()
        self._called(name, ctypes.byref(made), *arguments)
        return made

    def _describe(self, tensor):
        sizes, strides = ((ctypes.c_int64 * tensor.dim())(*of) for of in (tensor.shape, tensor.stride()))
        return self._made("dnnl_memory_desc_create_with_strides", tensor.dim(), sizes, FLOAT32, strides)

    def _memory(self, tensor, description=None):
        wanted = description or self._describe(tensor)
        return self._made("dnnl_memory_create", wanted, self.engine, ctypes.c_void_p(tensor.data_ptr()))

    def _primitive(self, description, tensors):
        primitive = self._made("dnnl_primitive_create", description)
        arguments = (_Argument * len(tensors))(*(_Argument(kind, memory.value) for kind, memory in tensors.items()))
        execute, wait, stream = self.library.dnnl_primitive_execute, self.library.dnnl_stream_wait, self.stream

        def run():
            if execute(primitive, stream, len(arguments), arguments) or wait(stream):
                raise SystemExit("oneDNN: dnnl_primitive_execute failed")

        return run

    def step(self, case, inputs):
        """A step of the two primitives, and where to find its results."""
        flags = SCALE_AND_SHIFT | (RELU if case.operation == "bn+relu" else 0)
        x, channels, eps = inputs.x, case.shape[1], ctypes.c_float(1e-5)
        names = ("mean", "var", "dweight", "dbias")
        made = {"y": torch.empty_like(x), "dx": torch.empty_like(x), **{name: torch.empty(channels) for name in names}}
        like = self._describe(x)
        first = self._made(
            "dnnl_batch_normalization_forward_primitive_desc_create",
            self.engine, TRAINING, like, like, eps, flags, None,
        )  # fmt: skip
        second = self._made(
            "dnnl_batch_normalization_backward_primitive_desc_create",
            self.engine, BACKWARD, like, like, like, eps, flags, first, None,
        )  # fmt: skip
        shared = {
            SRC: self._memory(x), MEAN: self._memory(made["mean"]), VARIANCE: self._memory(made["var"]),
            SCALE: self._memory(inputs.weight),
        }  # fmt: skip
        if flags & RELU:
            wanted = ctypes.c_void_p(self.library.dnnl_primitive_desc_query_md(first, WORKSPACE, 0))
            made["notes"] = torch.empty(self.library.dnnl_memory_desc_get_size(wanted), dtype=torch.uint8)
            shared[NOTES] = self._memory(made["notes"], wanted)
        there = self._primitive(first, {**shared, SHIFT: self._memory(inputs.bias), DST: self._memory(made["y"])})
        gradients = {
            DIFF_DST: self._memory(inputs.grad), DIFF_SRC: self._memory(made["dx"]),
            DIFF_SCALE: self._memory(made["dweight"]), DIFF_SHIFT: self._memory(made["dbias"]),
        }  # fmt: skip
        back = self._primitive(second, {**shared, **gradients})

        def step():
            there()
            back()
            return inputs

        return step, lambda: made


if __name__ == "__main__":
    main()
