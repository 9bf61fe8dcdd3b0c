"""Builds of the kernel beside each other and beside torch, taking turns in one process, on the layers users call.

    cp src/batchnorm/kernels/_bn.so /tmp/before.so      # then change the kernel and build it again
    python benchmarks/kernels.py /tmp/before.so src/batchnorm/kernels/_bn.so [--operations bn+relu] [--dtype bfloat16]
    python benchmarks/kernels.py src/batchnorm/kernels/_bn.so --ways     # one kernel, called from Python and from C

`batchnorm bench` run twice compares two moments of the machine; this compares two kernels. Ratios are medians of the
ratios within a round. At the end: their geometric means over the cells, against torch and of the last build against
the first.
"""

import argparse
import math
from pathlib import Path

import batchnorm as bn
from batchnorm import kernels
from batchnorm.bench import cases as grid
from batchnorm.bench.contenders import CONTENDERS
from batchnorm.bench.inputs import make_inputs
from batchnorm.bench.measure import alternate, ratio
from batchnorm.kernels import call, native
from batchnorm.records import Measurement, RecordFile


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--shapes", default="", help="such as 32x64x56x56,1024x512")
    parser.add_argument("--operations", default=",".join(grid.OPERATIONS))
    parser.add_argument("--dtype", default="float32", choices=grid.DTYPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keep-freed-memory", action="store_true")
    parser.add_argument("--ways", action="store_true", help="each build twice: called from Python, then from call.c")
    parser.add_argument("--json", help="write the samples here")
    options = parser.parse_args()
    if options.keep_freed_memory:
        bn.keep_freed_memory()
    ways = {" from Python": None, " from C": call.compiled} if options.ways else {"": call.compiled}
    builds = {f"{path}{way}": (load(path), short) for path in options.libraries for way, short in ways.items()}
    cells = grid.make_cases(
        grid.parse_shapes(options.shapes) if options.shapes else grid.SHAPES,
        operations=grid.parse_names(options.operations, "operations", grid.OPERATIONS),
        passes=["train"],
        dtype=options.dtype,
        memory="kept" if options.keep_freed_memory else "default",
    )
    records, gains = [], {}
    first, *_, last = [*builds] * 2  # the same one, if there is one
    for case in cells:
        times = measure(case, builds, options.rounds)
        records += times.values()
        found = {name: ratio(times["torch"], times[name]) for name in builds}
        found["gain"] = ratio(times[first], times[last])
        for name, value in found.items():
            gains.setdefault((case.operation, name), []).append(value)
        print(
            f"{case.label:44}",
            *(f"{times[name].median * 1e3:8.3f} ms ({found[name]:.2f}x)" for name in builds),
            f"  last against first {found['gain']:.2f}x",
            flush=True,
        )
    for (operation, name), values in gains.items():
        against = f"{last} against {first}" if name == "gain" else f"{name} against torch"
        print(f"{operation}: {against}: {math.exp(math.fsum(map(math.log, values)) / len(values)):.3f}x")
    if options.json:
        RecordFile("kernels", {**vars(options), "libraries": list(builds)}, tuple(records)).write(options.json)


def load(path):
    kernel, reason = native.load(path.resolve())
    if kernel is None:
        raise SystemExit(f"{path}: {reason}")
    return kernel


def measure(case, builds, rounds):
    """The times of torch and of every build, each with a layer of its own."""
    inputs = make_inputs(case)
    steps = {"torch": CONTENDERS["torch"].build(case, inputs)}
    for name, build in builds.items():
        steps[name] = with_build(*build, CONTENDERS["batchnorm"].build(case, inputs))
    return {
        name: Measurement("time", {**case.setting(), "contender": name}, samples, "s")
        for name, samples in alternate(steps, rounds).items()
    }


def with_build(kernel, compiled, step):
    def run():
        kernels._kernel, call.compiled = kernel, compiled
        return step()

    return run


if __name__ == "__main__":
    main()
