"""How near to the floor a step can come: what is left of it when nothing is computed.

    python benchmarks/floor.py [--shapes 32x256x14x14,64x128x256] [--rounds 40]

The floor of `batchnorm bench` copies one tensor to one other, again and again: two tensors, which stay in a cache if
they can. A step has four of its own. Beside the floor, our layer and torch's, these take turns:

    once       the step's own tensors, each moved once: x copied to y, then x + dy written to dx
    twice      the same, but x and dy are also read for their sums first, as the statistics of a batch want it
    autograd   how much longer `once` takes if a step of an autograd function that computes nothing follows it

All as multiples of the floor, medians of the ratios within a round; freed memory is kept, for everyone. `twice` and
`autograd` together are what a layer takes before it computes anything, if it reads its tensors twice from beyond the
nearest cache.
"""

import argparse
import statistics

import torch

import batchnorm as bn
from batchnorm import kernels
from batchnorm.bench import cases as grid
from batchnorm.bench.contenders import CONTENDERS
from batchnorm.bench.inputs import make_inputs
from batchnorm.bench.measure import alternate


class Nothing(torch.autograd.Function):
    """Saves what a layer saves, and gives back what is there already."""

    @staticmethod
    def forward(ctx, x, weight, bias, y):
        ctx.save_for_backward(x, weight, bias)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        return x.detach(), weight.detach(), bias.detach(), None


def steps_of(case):
    inputs = make_inputs(case)
    x, dy = inputs.x.detach(), inputs.grad
    y, dx = torch.empty_like(x), torch.empty_like(x)
    parameters = inputs.weight.clone().requires_grad_(), inputs.bias.clone().requires_grad_()

    def once():
        y.copy_(x)
        torch.add(x, dy, out=dx)

    def twice():
        torch.sum(x)
        y.copy_(x)
        torch.sum(x)
        torch.sum(dy)
        torch.add(x, dy, out=dx)

    def once_with_autograd():
        once()
        torch.autograd.grad(Nothing.apply(inputs.x, *parameters, y), (inputs.x, *parameters), dy)

    contenders = {name: CONTENDERS[name].build(case, inputs) for name in ("torch", "batchnorm", "floor")}
    return {**contenders, "once": once, "twice": twice, "once with autograd": once_with_autograd}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default="32x256x14x14,64x128x256,32x64x56x56")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    bn.keep_freed_memory()
    print(f"{'':32}{'floor':>9}{'once':>9}{'twice':>9}{'autograd':>10}{'batchnorm':>11}{'torch':>8}")
    for case in grid.make_cases(grid.parse_shapes(options.shapes), operations=["bn+relu"], passes=["train"]):
        times = alternate(steps_of(case), options.rounds)
        floor = [grid.floor_copies(case) * seconds for seconds in times["floor"]]
        times["autograd"] = tuple(b - a for a, b in zip(times["once"], times["once with autograd"], strict=True))

        def of_floor(name, times=times, floor=floor):
            return statistics.median(a / b for a, b in zip(times[name], floor, strict=True))

        print(
            f"{grid.shape_text(case.shape) + ' ' + case.layout:32}{statistics.median(floor) * 1e6:6.0f} us"
            f"{of_floor('once'):9.2f}{of_floor('twice'):9.2f}{of_floor('autograd'):10.2f}"
            f"{of_floor('batchnorm'):11.2f}{of_floor('torch'):8.2f}",
            flush=True,
        )
    kernel = kernels.kernel()
    if kernel is not None:
        print(f"a cache line takes {kernel.core_distance():.0f} ns from one core to the other")


if __name__ == "__main__":
    main()
