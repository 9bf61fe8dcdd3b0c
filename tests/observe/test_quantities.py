"""Every quantity against NumPy, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.observe.quantities import QUANTITIES
from batchnorm.observe.quantities.histogram import choose_range, count
from batchnorm.observe.subjects import SAMPLE, Signal, Weights, sampled_places

SHAPES = {"features": (64, 5), "images": (4, 5, 6, 7), "sequence": (4, 5, 6), "one axis": (30,)}


def read(name, subject):
    return QUANTITIES[name].read(subject)


def signal(x, module=None, kind="relu", at="input", **more):
    return Signal("layer", module or nn.ReLU(), kind, at, x, **more)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_mean_variance_percentiles(shape, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    if layout == "permuted" and x.dim() > 2:
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    values = x.double().numpy()
    assert read("mean", signal(x)).samples[0] == pytest.approx(values.mean(), rel=1e-6)
    assert read("variance", signal(x)).samples[0] == pytest.approx(values.var(), rel=1e-6)
    assert read("percentiles", signal(x)).samples == pytest.approx(np.percentile(values, [15, 50, 85]), rel=1e-6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_of_large_signals_a_sample_is_sorted_and_counted(memory_format):
    x = torch.randn(16, 32, 20, 20, generator=torch.Generator().manual_seed(0)) + torch.arange(32.0)[:, None, None]
    found = signal(x.contiguous(memory_format=memory_format))
    assert len(found.values) == SAMPLE
    assert read("mean", found).samples[0] == pytest.approx(x.double().mean().item(), rel=1e-6)  # of all
    assert read("percentiles", found).samples == pytest.approx(np.percentile(x.numpy(), [15, 50, 85]), abs=0.15)
    assert torch.equal(found.values, signal(x).values)  # the same places in both layouts
    total = read("histogram", found)
    assert sum(total.samples) + total.setting["under"] + total.setting["over"] == SAMPLE


@pytest.mark.parametrize("shape", [(7, 3001), (16, 32, 20, 20), (2, 64, 32, 32), (4, 16384), (32, 1024, 2)])
def test_the_sample_is_spread_over_examples_channels_and_positions(shape):
    places = sampled_places(math.prod(shape))
    assert len(set(places.tolist())) == SAMPLE
    for index, size in zip(np.unravel_index(places.numpy(), shape), shape, strict=True):
        shares = np.bincount(index, minlength=size) * size / SAMPLE
        if size <= 64:
            assert shares.min() > 0.8
            assert shares.max() < 1.2


def test_the_histogram_counts_as_numpy_does():
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-3, 3) * 2
    x[0, 0], x[1, 0], x[2, 0] = 6.0, -6.0, 6.000001
    reading = read("histogram", signal(x, kept={"range": (-6, 6), "bins": 30}))
    expected, _ = np.histogram(x.numpy(), bins=30, range=(-6, 6))
    assert reading.samples == tuple(expected)
    assert reading.setting == {"low": -6, "high": 6, "under": 0, "over": 1, "nonfinite": 0}


def test_the_edges_are_chosen_once():
    kept = {}
    first = read("histogram", signal(torch.randn(100, 3), kept=kept))
    second = read("histogram", signal(100 * torch.randn(100, 3), kept=kept))
    assert (first.setting["low"], first.setting["high"]) == (second.setting["low"], second.setting["high"])
    assert first.setting["under"] + first.setting["over"] == 0
    assert second.setting["under"] + second.setting["over"] > 200
    assert sum(second.samples) + second.setting["under"] + second.setting["over"] == 300


@pytest.mark.parametrize(
    ("values", "ends", "expected"),
    [
        (torch.zeros(10), None, (-1.0, 1.0)),
        (torch.full((10,), 5.0), None, (0.0, 10.0)),
        (torch.linspace(99, 101, 1001), None, (97.0, 103.0)),
        (torch.linspace(-1e-9, 1e-9, 1001), None, (-3e-9, 3e-9)),
        (torch.linspace(-0.1, 0.1, 1001), (-4.6, 4.6), (-6.0, 6.0)),
        (torch.linspace(-20, 2, 1001), (-2.3, 2.3), (-45.0, 25.0)),
    ],
)
def test_edges_leave_room_and_are_round(values, ends, expected):
    assert choose_range(values, ends) == expected


def test_before_the_first_finite_value_there_is_no_histogram():
    kept = {}
    assert read("histogram", signal(torch.full((3, 2), math.nan), kept=kept)) is None
    assert kept == {}
    assert count(torch.tensor([]), 0, 1, 2) == ((0.0, 0.0), 0, 0)


@pytest.mark.parametrize(
    ("module", "function"),
    [(nn.Sigmoid(), torch.sigmoid), (nn.Tanh(), torch.tanh)],
)
def test_saturation_is_where_the_output_is_near_an_end(module, function):
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    kind = type(module).__name__.lower()
    y = function(x)
    low = -1.0 if kind == "tanh" else 0.0
    expected = (((y - low) < 0.01 * (1 - low)) | ((1 - y) < 0.01 * (1 - low))).double().mean().item()
    assert 0.1 < expected < 0.9
    assert read("saturation", signal(x, module, kind)).samples == pytest.approx((expected,))


def test_saturation_of_hard_nonlinearities():
    x = torch.tensor([[-4.0, -3.0, -2.9, 0.0, 1.0, 2.0, 3.0, 5.0]])
    assert read("saturation", signal(x, nn.Hardsigmoid(), "hardsigmoid")).samples == (0.5,)
    assert read("saturation", signal(x, nn.Hardtanh(-2, 1), "hardtanh")).samples == (0.875,)
    assert read("saturation", signal(x)) is None


@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 3, 3)])
def test_dead_units(shape):
    x = torch.rand(shape) + 0.1
    x[:, 0], x[:, 2] = -1.0, 0.0
    x[:8, 1] = -1.0  # alive for one example
    assert read("dead", signal(x)).samples == (0.5,)
    assert read("dead", signal(torch.relu(x), nn.BatchNorm1d(4), "relu", "output")).samples == (0.5,)
    assert read("dead", signal(x, nn.GELU(), "gelu")) is None


@pytest.mark.parametrize("shape", [(16, 3), (8, 3, 4, 4)])
def test_gap(shape):
    layer = nn.BatchNorm1d(3)
    layer.running_mean.copy_(torch.tensor([0.0, 1.0, -2.0]))
    layer.running_var.copy_(torch.tensor([1.0, 4.0, 0.25]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + 1
    values = np.moveaxis(x.double().numpy(), 1, 0).reshape(3, -1)
    mean, var = values.mean(1), values.var(1, ddof=1)
    running, scale = layer.running_mean.double().numpy(), layer.running_var.double().numpy() + layer.eps
    expected = [
        np.sqrt(np.mean((mean - running) ** 2 / scale)),
        np.sqrt(np.mean(np.log((var + layer.eps) / scale) ** 2)),
    ]
    assert read("gap", signal(x, layer, "batch norm")).samples == pytest.approx(expected, rel=1e-6)
    assert read("gap", signal(x, layer, "batch norm", "output")) is None
    assert read("gap", signal(x, nn.BatchNorm1d(3, track_running_stats=False), "batch norm")) is None


def test_the_gap_is_to_the_statistics_before_the_batch_moved_them():
    layer = nn.BatchNorm1d(1, momentum=1.0)
    with bn.watch(layer, quantities="gap") as seen:
        layer(torch.tensor([[10.0], [12.0]]))
    assert seen.records.measurements[0].samples[0] == pytest.approx(11.0, rel=1e-4)


def test_gamma_and_beta():
    layer = nn.BatchNorm1d(3)
    layer.weight.data, layer.bias.data = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-1.0, 0.0, 4.0])
    x = torch.randn(4, 3)
    assert read("gamma", signal(x, layer, "batch norm")).samples == (3.0, 1.0, 6.0)
    assert read("beta", signal(x, layer, "batch norm")).samples == (1.0, -1.0, 4.0)
    for name in ("gamma", "beta"):
        assert read(name, signal(x, layer, "batch norm", "output")) is None
        assert read(name, signal(x, nn.BatchNorm1d(3, affine=False), "batch norm")) is None
        assert read(name, signal(x, nn.PReLU(3), "prelu")) is None


def test_norms_and_the_effective_rate():
    layer = nn.Conv2d(2, 3, 2)
    layer(torch.randn(4, 2, 5, 5)).square().sum().backward()
    weight = layer.weight.detach().double().numpy()
    gradient = np.sqrt(sum((p.grad.double().numpy() ** 2).sum() for p in layer.parameters()))
    weights = Weights("conv", dict(layer.named_parameters()), 0.3)
    assert read("weight norm", weights).samples == pytest.approx((np.linalg.norm(weight),), rel=1e-6)
    assert read("effective learning rate", weights).samples == pytest.approx((0.3 / (weight**2).sum(),), rel=1e-6)
    assert read("gradient norm", weights).samples == pytest.approx((gradient,), rel=1e-6)


def test_norms_of_what_has_no_weights_or_no_gradient():
    weights = Weights("bn", dict(nn.BatchNorm1d(3).named_parameters()), 0.3)
    for name in ("weight norm", "effective learning rate", "gradient norm"):
        assert read(name, weights) is None
    assert read("effective learning rate", Weights("fc", {"weight": torch.ones(2, 2)})) is None
    assert read("effective learning rate", Weights("fc", {"weight": torch.zeros(2, 2)}, 0.1)).samples == (math.inf,)


def test_sparse_gradients():
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 1, 4])).sum().backward()
    assert read("gradient norm", Weights("e", dict(layer.named_parameters()))).samples == pytest.approx((15**0.5,))


def test_padding_is_left_out():
    x = torch.randn(2, 3, 5)
    x[0, :, 2:] = 100.0
    lengths = torch.tensor([2, 5])
    found = signal(x, bn.MaskedBatchNorm(3), "batch norm", mask=lengths)
    kept = torch.cat([x[0, :, :2].flatten(), x[1].flatten()]).double().numpy()
    assert sorted(found.values.tolist()) == pytest.approx(sorted(kept))
    assert read("mean", found).samples[0] == pytest.approx(kept.mean(), rel=1e-6)
    assert read("variance", found).samples[0] == pytest.approx(kept.var(), rel=1e-6)


@pytest.mark.parametrize("positional", [True, False])
def test_the_mask_of_a_layer_is_found(positional):
    layer = bn.BatchNorm1d(3)
    x = torch.randn(2, 3, 5)
    x[0, :, 2:] = 100.0
    mask = torch.tensor([2, 5])
    with bn.watch(layer, quantities="percentiles") as seen:
        layer(x, None, mask) if positional else layer(input=x, mask=mask)
    assert [m.setting["at"] for m in seen.records.measurements] == ["input", "output"]
    assert all(m.samples[2] < 5 for m in seen.records.measurements)


def test_a_large_padded_batch():
    x = torch.randn(8, 16, 400)
    x[0, :, 10:] = 1e6
    mask = torch.tensor([10, *[400] * 7])
    assert signal(x, bn.MaskedBatchNorm(16), "batch norm", mask=mask).values.abs().max() < 10
