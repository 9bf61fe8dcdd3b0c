"""Hostile numbers: the kernel's error against float64 beside torch's, and batches that are not finite.

The criterion: in every quantity, the kernel's largest error is at most torch's own in the same call, plus one unit.
A unit is one rounding, in the result's type, of the largest number that the formula adds up:

    y               the largest |y|
    dx              the largest |gamma / sigma * dy|, of which dx is what the projections leave
    dgamma, dbeta   the largest of them, and for dgamma a denormal number's own step at every product
    running_mean    momentum times the largest |mean| or sigma (a mean near 0 of numbers far from 0), or the result
    running_var     the largest of them

An error that is not a number counts as infinite. Where torch's variance overflows float32 the reference still has an
answer, and so must the kernel.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_cases import NATIVE, PATHS, channel_last, path, threads

from batchnorm import reference as ref
from batchnorm.errors import BatchNormWarning, NonFiniteBatch
from batchnorm.functional import batch_norm

CHANNELS, MOMENTUM = 32, 0.1
STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
SMALLEST = 2.0**-149
TINY = {"eps": 1e-44}  # torch refuses 0
# The four ways through the kernel: runs, a matrix by chunks of rows, one by tiles, one whose columns are positions.
SHAPES = {
    "contiguous": ((16, CHANNELS, 64), lambda t: t),
    "channel last": ((16, CHANNELS, 64), channel_last),
    "rows": ((160, CHANNELS, 1), lambda t: t),
    "few positions": ((16, CHANNELS, 3), lambda t: t),
}


def outlier(z, value):
    z = z.clone()
    z[3, :, -1] = value
    return z


def first_rows(z, shift):
    z = z.clone()
    z[: len(z) // 8] += shift
    return z


def where_a_guess_looks(z, shift):
    """Unlike the rest in the middle of four samples and at the start of eight: there is no more for it to see."""
    z = z.clone()
    middle = z.shape[2] // 2
    z[:: len(z) // 4, :, max(0, middle - 8) : middle + 8] += shift
    z[:: len(z) // 8, :, 0] += shift
    return z


HOSTILE = {
    "plain": (lambda z: z, {}),
    "mean/std 1e4": (lambda z: 1e4 + z, {}),
    "mean/std 1e6": (lambda z: 1e6 + z, {}),
    "mean/std 1e6, small": (lambda z: 1e3 + 1e-3 * z, {}),
    "mean/std -1e6, in units of 1e10": (lambda z: (z - 1e6) * 1e10, {}),
    "std 1e-6": (lambda z: 1e-6 * z, {}),
    "std 1e-6 around 1": (lambda z: 1 + 1e-6 * z, {}),
    "std 1e-6, no eps": (lambda z: 1e-6 * z, TINY),
    "std 1e-12, no eps": (lambda z: 1e-12 * z, TINY),
    "std 1e-18, no eps": (lambda z: 1e-18 * z, TINY),
    "1e17": (lambda z: 1e17 * z, {}),
    "1e19, whose squares overflow": (lambda z: 1e19 * z, {}),
    "1e30": (lambda z: 1e30 * z, {}),
    "1e30 and a mean": (lambda z: 1e30 * (z + 10), {}),
    "1e-20, whose squares are denormal": (lambda z: 1e-20 * z, {}),
    "1e-25, whose squares vanish": (lambda z: 1e-25 * z, {}),
    "denormals": (lambda z: 1e-40 * z, {}),
    "constant": (lambda z: torch.full_like(z, 3.3), {}),
    "a large constant": (lambda z: torch.full_like(z, 1.2345e7), {}),
    "zero": (torch.zeros_like, {}),
    "nearly constant": (lambda z: outlier(torch.full_like(z, 3.3), 3.4), {}),
    "an outlier of 1e6": (lambda z: outlier(z, 1e6), {}),
    "an outlier of 1e12": (lambda z: outlier(z, 1e12), {}),
    "an outlier of 1e25": (lambda z: outlier(z, 1e25), {}),
    "first rows unlike the rest": (lambda z: first_rows(z, 1e5), {}),
    "first rows very unlike the rest": (lambda z: first_rows(z, 1e8), {}),
    "a guess misled": (lambda z: where_a_guess_looks(z, 1e3), {}),
    "a guess far off": (lambda z: where_a_guess_looks(z, 1e6), {}),
}


@pytest.fixture(params=NATIVE)
def native(request):
    with path(request.param), threads(1):
        yield request.param


@pytest.fixture(params=PATHS)
def any_path(request):
    with path(request.param), threads(1):
        yield request.param


def tensors_for(x, correlated, seed=2):
    """Parameters and a gradient; a correlated one lies almost wholly in the directions that dx is freed of."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(x.shape[1], generator=generator) + 0.5
    bias = torch.randn(x.shape[1], generator=generator)
    dy = torch.randn(x.shape, generator=generator)
    if correlated:
        wide = x.double()
        axes = (0, *range(2, x.dim()))
        spread = wide.std(axes, keepdim=True).clamp_min(1e-300)
        dy = 0.01 * dy + 1 + ((wide - wide.mean(axes, keepdim=True)) / spread).float()
    return weight, bias, dy.to(x.dtype)


def results(function, x, weight, bias, dy, eps):
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y = function(x, mean, var, weight, bias, True, MOMENTUM, eps)
    dx, dweight, dbias = torch.autograd.grad(y, [x, weight, bias], dy)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias, "running_mean": mean, "running_var": var}


def truth_and_units(x, weight, bias, dy, eps, repeated=1):
    """The reference's answer and the units; each value of `x` may stand for several."""
    dtype = x.dtype
    x, weight, bias, dy = (t.double().numpy() for t in (x, weight, bias, dy))
    out = ref.batch_norm_forward(x, weight, bias, eps)
    d = ref.batch_norm_backward(dy, x, weight, bias, eps)
    mean, var = ref.update_running(
        np.zeros_like(weight), np.ones_like(weight), out.mu, out.var, out.m * repeated, MOMENTUM
    )
    truth = {
        "y": out.y,
        "dx": d.dx,
        "dweight": d.dgamma * repeated,
        "dbias": d.dbeta * repeated,
        "running_mean": mean,
        "running_var": var,
    }
    scale = weight / np.sqrt(out.var + eps)
    largest = {name: np.max(np.abs(values)) for name, values in truth.items()}
    largest["dx"] = np.max(np.abs(scale)) * np.max(np.abs(dy))
    largest["running_mean"] = max(largest["running_mean"], MOMENTUM * np.sqrt(out.var).max())
    steps = {name: STEP[dtype if name in ("y", "dx") else torch.float32] for name in truth}
    units = {name: steps[name] * largest[name] for name in truth}
    units["dweight"] += out.m * repeated * SMALLEST / np.sqrt(out.var.min() + eps)
    return truth, {name: max(unit, SMALLEST) for name, unit in units.items()}


def error(values, truth):
    worst = np.max(np.abs(values.detach().double().numpy() - truth))
    return worst if np.isfinite(worst) else np.inf


def worse_than_torch(ours, torchs, truth, units, skip=()):
    found = []
    for name, values in truth.items():
        if name in skip:
            continue
        mine, theirs = error(ours[name], values), error(torchs[name], values)
        if not mine <= theirs + units[name] or not np.isfinite(mine):
            found.append(f"{name} is off by {mine:.3g}, torch by {theirs:.3g}, a unit is {units[name]:.3g}")
    return found


@pytest.mark.parametrize("correlated", [False, True], ids=["any dy", "correlated dy"])
@pytest.mark.parametrize("dtype", STEP, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_less_accurate_than_torch(native, name, way, dtype, correlated):
    make, options = HOSTILE[name]
    shape, layout = SHAPES[way]
    eps = options.get("eps", 1e-5)
    generator = torch.Generator().manual_seed(1)
    x = layout(make(torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype))
    weight, bias, dy = tensors_for(x, correlated)
    truth, units = truth_and_units(x, weight, bias, dy, eps)
    statistics = "running_mean", "running_var"
    if np.max(truth["running_var"]) > np.finfo(np.float32).max:
        with pytest.warns(BatchNormWarning, match="overflows float32"):
            ours = results(batch_norm, x, weight, bias, dy, eps)
        assert torch.equal(ours["running_mean"], torch.zeros(CHANNELS))
        assert torch.equal(ours["running_var"], torch.ones(CHANNELS))
    else:
        ours = results(batch_norm, x, weight, bias, dy, eps)
        statistics = ()
    torchs = results(F.batch_norm, x, weight, bias, dy, eps)
    found = worse_than_torch(ours, torchs, truth, units, skip=statistics)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", STEP, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [0.0, 1e2, 1e4, 1e6])
def test_two_values_per_channel(native, shift, dtype):
    found = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        for shape in [(2, CHANNELS), (1, CHANNELS, 2), (2, CHANNELS, 1, 1)]:
            x = (shift + torch.randn(shape, generator=generator)).to(dtype)
            weight, bias, dy = tensors_for(x, False, seed)
            truth, units = truth_and_units(x, weight, bias, dy, 1e-5)
            ours = results(batch_norm, x, weight, bias, dy, 1e-5)
            torchs = results(F.batch_norm, x, weight, bias, dy, 1e-5)
            found += worse_than_torch(ours, torchs, truth, units)
    assert not found, "\n".join(found)


def check_many(channels, values, repeated, layout, dtype=torch.float32):
    """`repeated` copies of each of `values` numbers in a channel, by expansion; the truth needs the numbers once."""
    generator = torch.Generator().manual_seed(0)
    x = (3 + torch.randn(1, channels, values, 1, generator=generator)).to(dtype)
    weight, bias, dy = tensors_for(x, False)
    truth, units = truth_and_units(x, weight, bias, dy, 1e-5, repeated)
    many = layout(x.expand(1, channels, values, repeated))
    calls = [results(f, many, weight, bias, dy.expand_as(many), 1e-5) for f in (batch_norm, F.batch_norm)]
    for call in calls:
        for name in ("y", "dx"):
            first, full = call[name].detach()[..., :1], call[name].detach()
            if call is calls[0]:
                assert torch.equal(full.amax(-1, True), first), name
                assert torch.equal(full.amin(-1, True), first), name
            call[name] = first.clone()
    found = worse_than_torch(*calls, truth, units)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", STEP, ids=["float32", "bfloat16"])
def test_a_million_values_per_channel(native, dtype):
    check_many(1, 1000, 1000, lambda t: t, dtype)
    check_many(16, 500, 200, lambda t: t.contiguous(memory_format=torch.channels_last), dtype)


@pytest.mark.slow
def test_a_hundred_million_values_per_channel(native):
    check_many(1, 1000, 100_000, lambda t: t)


@pytest.mark.slow
def test_ten_million_values_per_channel_channels_last(native):
    check_many(16, 1000, 10_000, lambda t: t.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("shift", [0.0, 1e4, 1e6])
def test_running_statistics_far_from_zero(native, shift, way):
    """Outside training torch multiplies before it subtracts; the kernel does not, and dx needs no statistics at all."""
    shape, layout = SHAPES[way]
    generator = torch.Generator().manual_seed(1)
    x = layout((shift + torch.randn(shape, generator=generator, dtype=torch.float64)).float()).requires_grad_()
    weight, bias, dy = tensors_for(x.detach(), False)
    mean, var = torch.full((CHANNELS,), shift + 0.25), torch.full((CHANNELS,), 1.5)
    wide = [t.detach().double().numpy() for t in (dy, x, weight, bias)]
    population = {"mu": mean.double().numpy(), "var": var.double().numpy()}
    truth = ref.batch_norm_forward(*wide[1:], 1e-5, **population).y
    gradient = ref.batch_norm_backward(*wide, 1e-5, **population).dx
    ours = batch_norm(x, mean, var, weight, bias)
    torchs = F.batch_norm(x, mean, var, weight, bias)
    unit = STEP[torch.float32] * np.max(np.abs(truth))
    assert error(ours, truth) <= error(torchs, truth) + unit
    (dx,) = torch.autograd.grad(ours, x, dy)
    assert error(dx, gradient) <= 2 * STEP[torch.float32] * np.max(np.abs(gradient))


# ---- numbers that are none ---------------------------------------------------------------------------------


def poisoned(way, value, place, dtype=torch.float32):
    """A batch with one bad value; the channel that has it, and the others."""
    shape, layout = SHAPES[way]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    sample, channel, position = {
        "first": (0, 0, 0),
        "middle": (shape[0] // 2, 13, shape[2] // 2),
        "last": (-1, -1, -1),
    }[place]
    x[sample, channel, position] = value
    return layout(x), channel % CHANNELS, [c for c in range(CHANNELS) if c != channel % CHANNELS]


@pytest.mark.parametrize("dtype", STEP, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_value_reaches_neither_the_statistics_nor_another_channel(any_path, value, way, place, dtype):
    x, bad, clean = poisoned(way, value, place, dtype)
    weight, bias, dy = tensors_for(x, False)
    mean, var = torch.randn(CHANNELS), torch.rand(CHANNELS)
    before = mean.clone(), var.clone()
    x.requires_grad_()
    with pytest.warns(BatchNormWarning, match="NaN or infinite"):
        y = batch_norm(x, mean, var, weight, bias, True)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    torchs = F.batch_norm(x, None, None, weight, bias, True)
    # In bfloat16 a unit of the last place apart; and torch's own channels_last sums are rounded to bfloat16.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 3e-2}
    torch.testing.assert_close(y[:, clean], torchs[:, clean], **tolerance)
    (dx,), (torch_dx,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(torchs, x, dy)
    torch.testing.assert_close(dx[:, clean], torch_dx[:, clean], **tolerance)
    if np.isnan(value):
        assert y[:, bad].isnan().all()
        assert dx[:, bad].isnan().all()
    else:
        assert not y[:, bad].isfinite().all()


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_batch_raises_where_that_was_asked_for(any_path, value, way):
    x, _, _ = poisoned(way, value, "last")
    mean, var = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    with pytest.raises(NonFiniteBatch):
        batch_norm(x, mean, var, training=True, nonfinite="raise")
    assert torch.equal(mean, torch.zeros(CHANNELS))
    assert torch.equal(var, torch.ones(CHANNELS))


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("magnitude", [1e20, 1e30, 1e38])
def test_a_variance_beyond_float32_is_not_remembered(any_path, magnitude, way):
    shape, layout = SHAPES[way]
    x = layout(magnitude * torch.randn(shape, generator=torch.Generator().manual_seed(3)).clamp(-1, 1))
    mean, var = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    with pytest.warns(BatchNormWarning, match="overflows float32"):
        y = batch_norm(x, mean, var, training=True)
    assert torch.equal(mean, torch.zeros(CHANNELS))
    assert torch.equal(var, torch.ones(CHANNELS))
    if any_path != "torch":
        truth = ref.batch_norm_forward(x.double().numpy()).y
        assert error(y, truth) <= 2 * STEP[torch.float32] * np.max(np.abs(truth))


@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "leaky_relu", "silu"])
@pytest.mark.parametrize("way", SHAPES)
def test_outside_training_a_bad_value_stays_where_it_is(native, way, activation):
    """And a NaN passes every activation, as in torch."""
    x, bad, clean = poisoned(way, np.nan, "middle")
    mean, var = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    y = batch_norm(x, mean, var, activation=activation)
    assert torch.equal(y.isnan(), x.isnan())
    x.requires_grad_()
    weight = torch.ones(CHANNELS, requires_grad=True)
    y = batch_norm(x, mean, var, weight, activation=activation)
    dx, dweight = torch.autograd.grad(y, [x, weight], torch.ones_like(x))
    assert dx.isnan().sum() <= 1  # torch's has none; the kernel reads x to find the slope
    assert dweight[bad].isnan()
    assert dweight[clean].isfinite().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001], ids=hex)
@pytest.mark.parametrize("place", ["running_mean", "running_var", "weight", "bias", "x", "residual"])
@pytest.mark.parametrize("way", SHAPES)
def test_any_nan_is_one_in_bfloat16_too(native, way, place, bits):
    """Rounding must not carry a NaN's bits over into a zero, nor cut off the ones that make it a NaN."""
    shape, layout = SHAPES[way]
    generator = torch.Generator().manual_seed(3)
    tensors = {name: layout(torch.randn(shape, generator=generator).bfloat16()) for name in ("x", "residual")}
    for name, value in (("running_mean", 0.0), ("running_var", 1.0), ("weight", 1.0), ("bias", 0.0)):
        tensors[name] = torch.full((CHANNELS,), value)
    kind = (torch.int16, torch.bfloat16) if place in ("x", "residual") else (torch.int32, torch.float32)
    bad = torch.tensor([bits >> 16 | 1 if kind[0] is torch.int16 else bits], dtype=kind[0]).view(kind[1])
    tensors[place].movedim(min(1, tensors[place].dim() - 1), -1)[..., 5:7] = bad
    for activation in ("none", "relu", "silu"):
        x = tensors["x"].detach().requires_grad_()
        y = batch_norm(**{**tensors, "x": x}, activation=activation)
        for quantity in (y, *torch.autograd.grad(y, x, torch.ones_like(y))):
            assert not quantity[:, 7:].isnan().any()
            assert not quantity[:, :5].isnan().any()
            if quantity is y or place in ("running_var", "weight"):
                assert quantity[:, 5:7].isnan().all()


@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "leaky_relu", "silu"])
def test_activations_of_extreme_values(native, activation):
    """Normalised with given statistics of 0 and 1, so that the activation alone is seen."""
    z = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 6.0, 5.9999995, 6.0000005, -6.0, 20.0, -20.0, 87.0, -87.0])
    z = torch.cat([z, torch.tensor([89.0, -89.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38]), torch.linspace(-12, 12, 100)])
    x = z[:, None].repeat(1, CHANNELS).requires_grad_()
    y = batch_norm(x, torch.zeros(CHANNELS), torch.ones(CHANNELS), eps=0.0, activation=activation)
    (dx,) = torch.autograd.grad(y.sum(), x)
    wide = z.double().numpy()
    value, slope = ref.ACTIVATIONS[activation]
    np.testing.assert_allclose(y.detach().numpy()[:, 0], value(wide, 0.01), rtol=5e-7, atol=1e-34)
    np.testing.assert_allclose(dx.numpy()[:, 0], slope(wide, 0.01), rtol=1e-6, atol=1e-6)
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert torch.equal(dx, dx[:, :1].expand_as(dx))
