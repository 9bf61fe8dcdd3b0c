"""Cases for the kernel's tests: inputs in every memory layout, one call of `batch_norm`, and the reference's answer."""

import contextlib
import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from batchnorm import kernels
from batchnorm import reference as ref
from batchnorm.functional import batch_norm
from batchnorm.kernels import call as kernel_call

ACTIVATIONS = ("none", "relu", "relu6", "leaky_relu", "silu")
KINKS = {"none": (), "relu": (0.0,), "relu6": (0.0, 6.0), "leaky_relu": (0.0,), "silu": ()}
SLOPE = 0.2
POSITIONS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 49, 65)
CHANNELS = (1, 2, 3, 7, 16, 17, 33, 100)
BATCHES = (1, 2, 3, 8, 9, 17)
# Torch rounds between the operators of its path (in bfloat16, to 8 bits each time); the kernel rounds once.
TOLERANCE = {
    ("native", torch.float32): 2e-6,
    ("native", torch.bfloat16): 6e-3,
    ("torch", torch.float32): 2e-5,
    ("torch", torch.bfloat16): 4e-2,
}
# Above the 16,384 elements that one thread does alone. Runs go by chunks of samples, with all channels or blocks of up
# to 256, long ones in pieces; many channels of less than 1.5 KB go one after the other. Few rows of a matrix go by
# tiles of columns (up to 63, or 256 if they are 2,048 columns wide), more by chunks of rows; chunks that are fewer than
# the threads are cut into tiles.
LARGE = {
    "runs, channels shared out": ((8, 70, 40), "contiguous"),
    "runs, uneven chunks of samples": ((70, 40, 60), "contiguous"),
    "runs, chunks and blocks": ((19, 300, 40), "contiguous"),
    "runs, one channel": ((9, 1, 2500), "contiguous"),
    "runs, three channels": ((7, 3, 33, 29), "contiguous"),
    "runs cut into pieces": ((1, 2, 65536), "contiguous"),
    "runs cut unevenly": ((3, 1, 70003), "contiguous"),
    "runs of 31, blocks of channels": ((5, 131, 31), "contiguous"),
    "matrix, tiles of channels": ((63, 400), "contiguous"),
    "matrix, tiles of two chunks": ((70, 300), "contiguous"),
    "matrix, 256 rows": ((256, 67), "contiguous"),
    "matrix, 256 wide rows": ((256, 2050), "contiguous"),
    "matrix, 257 wide rows": ((257, 2050), "contiguous"),
    "matrix, short chunks": ((1100, 17), "contiguous"),
    "matrix of positions, tiles": ((40, 100, 7), "contiguous"),
    "matrix of positions, tiles of chunks": ((70, 61, 5), "contiguous"),
    "matrix of positions, rows": ((400, 23, 3), "contiguous"),
    "channel last": ((6, 33, 10, 11), "channel_last"),
    "channel last, few rows": ((2, 150, 9, 8), "channel_last"),
    "channel last, wide": ((3, 600, 4, 4), "channel_last"),
}


def channel_last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def strided(t):
    """Every second element of the last dimension."""
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


def inner(t):
    """A window of a larger tensor, NaN all around it."""
    room = torch.full([n + 2 for n in t.shape], torch.nan, dtype=t.dtype)
    window = room[tuple(slice(1, -1) for _ in t.shape)]
    return window.copy_(t)


def misaligned(t):
    """Contiguous, but not where an allocator would put it."""
    return torch.cat([torch.full((1,), torch.nan, dtype=t.dtype), t.flatten()])[1:].view(t.shape)


def transposed(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def backwards(t):
    """The last dimension is the slowest in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


LAYOUTS = {
    "contiguous": lambda t: t,
    "channel_last": channel_last,
    "strided": strided,
    "inner": inner,
    "misaligned": misaligned,
    "transposed": transposed,
    "backwards": backwards,
    "expanded": lambda t: t[..., :1].expand_as(t),
}


@dataclass(frozen=True)
class Strides:
    """Any layout: the order of the dimensions in memory, and of each a step and a start."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    starts: tuple[int, ...]

    def __call__(self, t):
        sizes = [start + n * step for n, step, start in zip(t.shape, self.steps, self.starts, strict=True)]
        room = torch.full([sizes[d] for d in self.order], torch.nan, dtype=t.dtype)
        back = room.permute(*[self.order.index(d) for d in range(t.dim())])
        window = back[tuple(slice(start, None, step) for step, start in zip(self.steps, self.starts, strict=True))]
        return window.copy_(t)


def laid_out(t, layout):
    """The values of `t` in another layout ("expanded" repeats some of them)."""
    return layout(t) if isinstance(layout, Strides) else LAYOUTS[layout](t)


@dataclass(frozen=True)
class Case:
    """One call; everything about it follows from these fields."""

    shape: tuple[int, ...]
    layout: str | Strides = "contiguous"
    dtype: torch.dtype = torch.float32
    activation: str = "none"
    residual: bool = False
    training: bool = True
    affine: str = "both"  # or "none", "weight"
    gradient_layout: str | Strides = "contiguous"
    parameters: torch.dtype = torch.float32
    eps: float = 1e-5
    momentum: float = 0.1
    seed: int = 0


@functools.cache
def inputs(case):
    """The tensors of a call, by name; all but the gradient and the running statistics want a gradient of their own."""
    generator = torch.Generator().manual_seed(case.seed)
    channels = case.shape[1]

    def normal(*shape, scale=1.0, shift=0.0, dtype=case.dtype):
        return (torch.randn(shape, generator=generator) * scale + shift).to(dtype)

    tensors = {"x": laid_out(normal(*case.shape, scale=2.0, shift=1.0), case.layout)}
    if case.residual:
        tensors["residual"] = laid_out(normal(*case.shape), case.layout)
    if case.affine != "none":
        tensors["weight"] = normal(channels, scale=0.5, shift=1.5, dtype=case.parameters)
    if case.affine == "both":
        tensors["bias"] = normal(channels, dtype=case.parameters)
    tensors["running_mean"] = normal(channels, dtype=case.parameters)
    tensors["running_var"] = normal(channels, scale=0.2, dtype=case.parameters).exp()
    dy = normal(*case.shape)
    # Within rounding of a kink, either slope is right: such places get no gradient, so that none is compared.
    z = forward(replace(case, activation="none"), tensors).y
    margin = 1e-4 if case.dtype == torch.float32 else 6e-2
    for kink in KINKS[case.activation]:
        dy[torch.from_numpy(np.abs(z - kink) < margin)] = 0.0
    tensors["dy"] = laid_out(dy, case.gradient_layout)
    if case.gradient_layout == "expanded":
        assert not KINKS[case.activation], "an expanded gradient cannot avoid the kinks"
    for name in ("x", "residual", "weight", "bias"):
        if name in tensors:
            tensors[name].requires_grad_()
    return tensors


def as_float64(tensors):
    return {name: t.detach().double().numpy() for name, t in tensors.items()}


def forward(case, tensors):
    t = as_float64(tensors)
    population = {} if case.training else {"mu": t["running_mean"], "var": t["running_var"]}
    return ref.batch_norm_forward(
        t["x"],
        t.get("weight"),
        t.get("bias"),
        case.eps,
        case.activation,
        t.get("residual"),
        SLOPE,
        **population,
    )


def expected(case, tensors):
    """What the reference computes in float64, by name."""
    t = as_float64(tensors)
    out = forward(case, tensors)
    population = {} if case.training else {"mu": t["running_mean"], "var": t["running_var"]}
    d = ref.batch_norm_backward(
        t["dy"],
        t["x"],
        t.get("weight"),
        t.get("bias"),
        case.eps,
        case.activation,
        t.get("residual"),
        SLOPE,
        **population,
    )
    mean, var = t["running_mean"], t["running_var"]
    if case.training:
        mean, var = ref.update_running(mean, var, out.mu, out.var, out.m, case.momentum)
    result = {"y": out.y, "dx": d.dx, "running_mean": mean, "running_var": var}
    gradients = {"dresidual": d.dresidual, "dweight": d.dgamma, "dbias": d.dbeta}
    if "residual" in tensors:
        # The reference gives the gradient behind the activation, which the residual shares with beta.
        gradients["dresidual"] = t["dy"] * slope_at(case, tensors)
    return result | {name: value for name, value in gradients.items() if name[1:] in tensors}


def slope_at(case, tensors):
    z = forward(replace(case, activation="none"), tensors).y
    return ref.ACTIVATIONS[case.activation][1](z, SLOPE)


def call(case, tensors, buffers=None):
    """The output of `batch_norm`; the running statistics of `tensors` are left alone."""
    if buffers is None:
        buffers = tensors["running_mean"].clone(), tensors["running_var"].clone()
    return batch_norm(
        tensors["x"],
        *buffers,
        tensors.get("weight"),
        tensors.get("bias"),
        case.training,
        case.momentum,
        case.eps,
        activation=case.activation,
        residual=tensors.get("residual"),
        negative_slope=SLOPE,
    )


def run(case, tensors):
    """All results of a call and its gradients, by the names that `expected` uses."""
    buffers = tensors["running_mean"].clone(), tensors["running_var"].clone()
    y = call(case, tensors, buffers)
    wanted = [name for name in ("x", "residual", "weight", "bias") if name in tensors]
    gradients = torch.autograd.grad(y, [tensors[name] for name in wanted], tensors["dy"])
    result = {"y": y, "running_mean": buffers[0], "running_var": buffers[1]}
    return result | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


def took_native(y):
    """Whether the output came out of the compiled kernel."""
    return type(y.grad_fn).__name__ in ("NativeBackward", "PlainBackward")


def units(case, tensors, wanted):
    """For each quantity the size of the numbers it is computed from, which its rounding errors are relative to."""
    t = as_float64(tensors)
    xhat, dy = np.abs(forward(case, tensors).xhat).max(), np.abs(t["dy"]).max()
    mean = np.abs(t["x"] - t["x"].mean()).max() + np.abs(t["x"]).max()
    variance = t["running_var"] if not case.training else t["x"].var(axis=(0, *range(2, t["x"].ndim)))
    scale = np.max(np.abs(t.get("weight", 1.0)) / np.sqrt(variance + case.eps))
    terms = {"dx": scale * dy, "dweight": dy * xhat, "dbias": dy, "running_mean": mean}
    return {name: max(1.0, np.abs(v).max(), terms.get(name, 0.0)) for name, v in wanted.items()}


@functools.cache
def answer(case):
    """The reference's results for the inputs of a case, and their units."""
    wanted = expected(case, inputs(case))
    return wanted, units(case, inputs(case), wanted)


def differences(case, actual, tolerance):
    """Sentences about the quantities that are off the reference, of which there should be none.

    The tolerance counts in the units above; to it a bfloat16 result adds its own rounding.
    """
    found = []
    wanted, unit = answer(case)
    assert actual.keys() == wanted.keys()
    for name, values in wanted.items():
        got = actual[name].detach()
        assert tuple(got.shape) == values.shape, name
        bound = np.full(values.shape, tolerance * unit[name])
        if got.dtype == torch.bfloat16:
            bound += 2.0**-8 * np.abs(values)
        error = np.abs(got.double().numpy() - values)
        if not np.all(error <= bound):
            worst = np.unravel_index(np.argmax(error - bound), error.shape)
            found.append(f"{name} is off by {error[worst]:.3g} (allowed {bound[worst]:.3g}) at {worst} in {case}")
    return found


def wrong(case, on_path):
    """What is wrong about one call, and whether it went where it should."""
    tensors = inputs(case)
    actual = run(case, tensors)
    elements = tensors["x"].numel()
    enough = elements >= 16 * case.shape[0] and elements >= 2 * case.shape[1]
    native = took_native(actual["y"])
    assert native == (on_path != "torch" and enough), case
    return differences(case, actual, TOLERANCE["native" if native else "torch", case.dtype])


def odd_shapes(positions, layout):
    """Cases of all sizes around the width of a vector, the other choices taking turns."""
    turn = positions
    for channels, batch in itertools.product(CHANNELS, BATCHES):
        if layout == "channel_last" and (positions == 1 or channels < 16):
            continue  # the same memory as contiguous, or copied to it
        turn += 1
        yield Case(
            (batch, channels, positions),
            layout,
            (torch.float32, torch.bfloat16)[turn % 7 == 0],
            ACTIVATIONS[turn % 5],
            residual=turn % 3 == 0,
            training=turn % 4 != 0 and batch * positions > 1,
            affine=("both", "none", "weight")[turn % 11 % 3],
            seed=turn,
        )


def large(name, count=0):
    """Cases of one of the large shapes; which of them has a residual depends on `count`."""
    shape, layout = LARGE[name]
    choices = [("none", torch.float32), ("relu", torch.float32), ("silu", torch.bfloat16)]
    for i, (activation, dtype) in enumerate(choices):
        for training in (True, False):
            yield Case(shape, layout, dtype, activation, (i + count) % 2 == 0, training, seed=i)


@contextlib.contextmanager
def path(name, kernel=None):
    """Send calls to torch's operators, or to the kernel (given, or the installed one) with an instruction set.

    "python" is the installed kernel, called from Python.
    """
    if name == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_call, "compiled", None)
            with path(kernels.kernel().isa if kernels.kernel() else "native"):
                yield
        return
    installed = kernels._kernel
    if name == "torch":
        kernels._kernel = None
        try:
            yield
        finally:
            kernels._kernel = installed
        return
    kernel = kernel or installed
    if kernel is None:
        pytest.skip(f"no compiled kernel: {kernels.describe()}")
    before, kernels._kernel = kernel.isa, kernel
    try:
        assert kernel.select(name)
        yield
    finally:
        kernel.select(before)
        kernels._kernel = installed


def instruction_sets(kernel):
    """Those of a kernel that this CPU has; if there is no kernel, one that is skipped with the reason."""
    if kernel is None:
        return ("native",)
    before = kernel.isa
    found = tuple(isa for isa in kernel.isas() if kernel.select(isa))
    kernel.select(before)
    return found


NATIVE = instruction_sets(kernels.kernel())
PATHS = ("torch", "python", *NATIVE)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
