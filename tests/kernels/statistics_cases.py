"""Cases for masks, groups and given moments, and the reference's answer on the values that count."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from kernel_cases import KINKS, LAYOUTS, SLOPE, took_native

from batchnorm import reference as ref
from batchnorm.functional import batch_norm, moments

EPS, MOMENTUM = 1e-5, 0.1
# In the units of the numbers that a result is made of; torch's operators round more often than the kernel.
TOLERANCE = {
    ("native", torch.float32): 3e-6,
    ("native", torch.bfloat16): 6e-3,
    ("torch", torch.float32): 3e-5,
    ("torch", torch.bfloat16): 4e-2,
    ("torch", torch.float64): 1e-12,
}
# Long rows of positions; short ones, which become rows of channels; no positions; channels too few for that.
SHAPES = [(5, 3, 40), (7, 20, 3, 5), (19, 33), (4, 18, 7, 5), (3, 4, 17), (300, 17), (6, 2, 2, 3)]


@dataclass(frozen=True)
class Case:
    """One call; everything about it follows from these fields."""

    shape: tuple[int, ...]
    mask: str | None = None
    groups: int = 1
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    activation: str = "none"
    residual: bool = False
    affine: bool = True
    padding: float = float("nan")  # what stands where the mask is false
    mean: float = 1.0  # of x, whose deviation is 2
    given: bool = False  # the moments are computed first and handed over
    reduce: bool = False  # as if there were other processes
    training: bool = True
    seed: int = 0


def random_mask(case, generator):
    """True where a position counts; every group keeps at least two."""
    samples, places = case.shape[0], (case.shape[0], int(np.prod(case.shape[2:])))
    at = torch.arange(places[1])
    uniform = torch.rand(places, generator=generator)
    starts = (uniform[:, :1] * places[1]).long()
    mask = {
        "random": uniform > 0.4,
        "lengths": at < 1 + starts,
        "islands": (at >= starts) & (at < starts + 3),  # shorter than any vector
        "all": uniform >= 0,
        "samples": (uniform[:, :1] > 0.5).expand(places),
        "rare": uniform > 0.97,
    }[case.mask].clone()
    for g in range(case.groups):
        part = mask[g * samples // case.groups : (g + 1) * samples // case.groups]
        if part.sum() < 2:
            part.view(-1)[[0, -1]] = True
    return mask.view(samples, *case.shape[2:])


@functools.cache
def inputs(case):
    generator = torch.Generator().manual_seed(case.seed)
    channels = case.shape[1]
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32

    def normal(*shape, scale=1.0, shift=0.0, dtype=case.dtype):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)

    t = {"x": normal(*case.shape, scale=2.0, shift=case.mean)}
    if case.residual:
        t["residual"] = normal(*case.shape)
    if case.affine:
        t["weight"] = normal(channels, scale=0.5, shift=1.5, dtype=wide)
        t["bias"] = normal(channels, dtype=wide)
    t["running_mean"] = normal(channels, dtype=wide)
    t["running_var"] = normal(channels, scale=0.2, dtype=wide).exp()
    t["dy"] = normal(*case.shape)
    if case.mask:
        t["mask"] = random_mask(case, generator)
    if case.layout == "expanded":
        t["x"] = t["x"][..., :1].expand_as(t["x"])
    elif case.mask:
        for name in {"x", "residual", "dy"} & t.keys():
            t[name] = torch.where(t["mask"].unsqueeze(1), t[name], case.padding)
    if case.layout != "expanded":
        for name in {"x", "residual"} & t.keys():
            t[name] = LAYOUTS[case.layout](t[name])
    # Within rounding of a kink, either slope is right: such places get no gradient, so that none is compared.
    z = gathered(case, t, forward_only=True)["z"]
    margin = 6e-2 if case.dtype == torch.bfloat16 else 1e-4 * max(1.0, case.mean / 1e3)
    for kink in KINKS[case.activation]:
        t["dy"][torch.from_numpy(np.abs(z - kink) < margin)] = 0.0
    for name in {"x", "residual", "weight", "bias"} & t.keys():
        t[name].requires_grad_()
    return t


def gathered(case, tensors, forward_only=False):
    """The results by reference.py, group for group, of the values that count as a matrix of (values, channels)."""
    t = {
        name: v.detach().numpy() if v.dtype == torch.bool else v.detach().double().numpy()
        for name, v in tensors.items()
    }
    samples, shape = case.shape[0], case.shape
    mask = t.get("mask", np.ones((samples, *shape[2:]), bool))
    weight, bias = t.get("weight"), t.get("bias")
    population = {} if case.training else {"mu": t["running_mean"], "var": t["running_var"]}
    out = {name: np.zeros(shape) for name in ("z", "y", "dx", "dresidual", "scale")}
    dweight = dbias = 0.0
    means, variances = [], []
    for g in range(case.groups if case.training else 1):
        groups = case.groups if case.training else 1
        where = np.zeros_like(mask)
        where[g * samples // groups : (g + 1) * samples // groups] = True
        where &= mask

        def pick(name, where=where):
            return np.moveaxis(t[name], 1, -1)[where] if name in t else None

        def put(name, values, where=where):
            np.moveaxis(out[name], 1, -1)[where] = values

        arguments = (weight, bias, EPS)
        z = ref.batch_norm_forward(pick("x"), *arguments, "none", pick("residual"), SLOPE, **population)
        put("z", z.y)
        means.append(z.mu)
        variances.append(z.var)
        put("scale", np.abs((1.0 if weight is None else weight) / np.sqrt(z.var + EPS)) * np.ones_like(z.y))
        if forward_only:
            continue
        y = ref.batch_norm_forward(pick("x"), *arguments, case.activation, pick("residual"), SLOPE, **population)
        put("y", y.y)
        d = ref.batch_norm_backward(
            pick("dy"), pick("x"), *arguments, case.activation, pick("residual"), SLOPE, **population
        )
        put("dx", d.dx)
        put("dresidual", d.dresidual)
        dweight, dbias = dweight + d.dgamma, dbias + d.dbeta
    if forward_only:
        return out
    everything = np.moveaxis(t["x"], 1, -1)[mask]
    running = t["running_mean"], t["running_var"]
    if case.training:
        whole = ref.normalize(everything, "batch")
        running = ref.update_running(*running, whole.mu, whole.var, whole.m, MOMENTUM)
    return out | {
        "dweight": dweight,
        "dbias": dbias,
        "running_mean": running[0],
        "running_var": running[1],
        "means": np.array(means),
        "variances": np.array(variances),
    }


@functools.cache
def answer(case):
    return gathered(case, inputs(case))


def run(case, tensors, reduce=None):
    """One call and its gradients, by the names that `gathered` uses."""
    t = tensors
    buffers = t["running_mean"].clone(), t["running_var"].clone()
    statistics = {"mask": t.get("mask"), "groups": case.groups}
    if case.given or case.reduce:
        statistics["moments"] = moments(t["x"], **statistics)
    if case.reduce:
        statistics["reduce"] = reduce or (lambda sums: sums.clone())
    y = batch_norm(
        t["x"], *buffers, t.get("weight"), t.get("bias"), case.training, MOMENTUM, EPS,
        activation=case.activation, residual=t.get("residual"), negative_slope=SLOPE, **statistics,
    )  # fmt: skip
    wanted = [name for name in ("x", "residual", "weight", "bias") if name in t]
    gradients = torch.autograd.grad(y, [t[name] for name in wanted], t["dy"])
    result = {"y": y, "running_mean": buffers[0], "running_var": buffers[1]}
    return result | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


def is_for_the_kernel(case):
    elements, positions = int(np.prod(case.shape)), int(np.prod(case.shape[2:]))
    enough = elements >= 16 * case.shape[0] and elements >= 2 * case.shape[1]
    return case.dtype != torch.float64 and enough and (not case.mask or positions >= 16 or case.shape[1] >= 16)


def wrong(case, on_path):
    """What is wrong about one call, and whether it went where it should."""
    actual, wanted = run(case, inputs(case)), answer(case)
    native = took_native(actual["y"])
    assert native == (on_path != "torch" and is_for_the_kernel(case)), case
    tolerance = TOLERANCE["native" if native else "torch", case.dtype]
    if not native:
        tolerance *= max(1.0, case.mean)  # torch's operators keep the mean as one number of the input's dtype
    biggest = {"dx": wanted["scale"] * 4.0, "running_mean": case.mean}  # a gradient of up to about four deviations
    for name in ("dweight", "dbias"):
        biggest[name] = 4.0 * np.sqrt(np.prod(case.shape) / case.shape[1])
    found = []
    for name, got in actual.items():
        values = wanted[name]
        bound = tolerance * np.maximum(max(1.0, np.abs(values).max()), biggest.get(name, 0.0)) * np.ones_like(values)
        if got.dtype == torch.bfloat16:
            bound += 2.0**-8 * np.abs(values)
        if case.mask and name in ("y", "dx", "dresidual"):
            outside = ~inputs(case)["mask"].unsqueeze(1).expand(case.shape)
            if bool((got.detach()[outside] != 0).any()):
                found.append(f"{name} is not zero on the padding in {case}")
        error = np.abs(got.detach().double().numpy() - values)
        if not np.all(error <= bound):
            worst = np.unravel_index(np.nanargmax(error - bound), error.shape)
            found.append(f"{name} is off by {error[worst]:.3g} (allowed {bound[worst]:.3g}) at {worst} in {case}")
    return found
