"""accelerate: the function is kept, the times are reported, and whatever layout is chosen goes all the way."""

import copy
import json
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.transforms import timing
from batchnorm.transforms.gradients import apart, step
from batchnorm.transforms.layout import in_layout


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


WAYS = ["as it was", "fused", "channels_last", "fused, channels_last"]


def network():
    return nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))


def pretend(monkeypatch, fastest):
    """Let one contender be the fastest, whatever the clock says."""

    def measure(contenders, steps, warm_up=2, seconds=0.0):
        for function in contenders.values():
            function()
        seconds = {name: 1.0 if name == fastest else 2.0 for name in contenders}
        return tuple(bn.records.Measurement("time", {"contender": n}, (s,) * steps, "s") for n, s in seconds.items())

    monkeypatch.setattr(import_module("batchnorm.transforms.accelerate"), "measure", measure)


def test_the_function_is_kept_and_the_ratio_reported():
    model, x = network(), torch.randn(4, 3, 10, 10)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    faster, report = bn.accelerate(model, x, steps=3, seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in faster.state_dict().items())
    assert all(relative < 1e-4 for _, relative, _ in apart(step(model, x), step(faster, x)).values())
    assert [m.setting["contender"] for m in report.times] == WAYS
    assert all(len(m.samples) == 3 and min(m.samples) > 0 for m in report.times)
    assert report.speedup == report.speedups.median > 0
    assert report.chosen == "as it was"  # three steps show nothing
    assert "nothing that was tried is reliably faster" in str(report)
    assert json.loads(report.to_json())["chosen"] == report.chosen


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_fastest_is_chosen(monkeypatch, layout):
    other = {"contiguous": "channels_last", "channels_last": "contiguous"}[layout]
    model, x = in_layout(network(), layout), torch.randn(4, 3, 10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    for chosen, kept in ((f"fused, {other}", other), (other, other), ("fused", layout), ("as it was", layout)):
        pretend(monkeypatch, chosen)
        mine = copy.deepcopy(optimizer)
        twin = nn.Sequential(*model)
        mine.param_groups[0]["params"], state = list(twin.parameters()), list(mine.state.values())
        mine.state.clear()
        mine.state.update(zip(twin.parameters(), state, strict=True))
        faster, report = bn.accelerate(twin, x, steps=9, seconds=0, optimizer=mine)
        assert report.chosen == chosen
        assert report.speedup == (1.0 if chosen == "as it was" else 2.0)
        wanted = torch.channels_last if kept == "channels_last" else torch.contiguous_format
        weight = faster[0].weight
        assert weight.is_contiguous(memory_format=wanted)
        assert mine.param_groups[0]["params"][0] is weight
        assert mine.state[weight]["momentum_buffer"].is_contiguous(memory_format=wanted)
        assert type(faster[1]) is (bn.BatchNorm2d if "fused" in chosen else nn.BatchNorm2d)
        assert (report.certificate is None) == (chosen == "as it was")
        assert f"{chosen}: 2.00 times as fast" in str(report) or chosen == "as it was"
        assert ("memory layout" in str(report)) == (kept != layout)
        assert bool(report.changes) == (chosen != "as it was")
        torch.testing.assert_close(faster(x), model(x))
        assert faster(x).is_contiguous(memory_format=wanted)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = (nn.BatchNorm2d(16) for _ in range(2))

    def forward(self, x):
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x).relu()


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_rounding_of_torchs_own_layers_in_another_layout_is_no_difference(monkeypatch, seed):
    torch.manual_seed(seed)
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model, x = nn.Sequential(nn.Sequential(*stem), Block(), Block(), nn.Sequential(*head)), torch.randn(8, 3, 32, 32)
    for chosen in ("channels_last", "fused, channels_last"):
        pretend(monkeypatch, chosen)
        faster, report = bn.accelerate(model, x, steps=11, seconds=0)
        assert report.chosen == chosen
        assert report.gradients.relative <= 1e-4
        assert faster[0][0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_without_convolutions_has_one_layout():
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU())
    losses = []

    def loss(y):
        losses.append(y.shape)
        return y.sum()

    _, report = bn.accelerate(model, torch.randn(8, 3), loss=loss, steps=2, seconds=0)
    assert [m.setting["contender"] for m in report.times] == ["as it was", "fused"]
    assert len(losses) == 2 * (2 + 2)


INFERENCE = ["as it was", "folded", "folded, channels_last"]


def preactivated():
    """The second BN layer cannot be folded: a convolution that pads follows it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
    )


def with_statistics(model):
    """Statistics, gamma and beta that an identity does not have."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.running_mean, layer.running_var, layer.weight.data, layer.bias.data):
                tensor.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("make", [network, preactivated])
@pytest.mark.parametrize("chosen", INFERENCE)
def test_inference_is_folded(monkeypatch, make, chosen):
    model, x = with_statistics(make()), torch.randn(4, 3, 10, 10)
    before = copy.deepcopy(model.state_dict())
    pretend(monkeypatch, chosen)
    faster, report = bn.accelerate(model, x, steps=9, seconds=0)
    assert [m.setting["contender"] for m in report.times] == INFERENCE
    assert report.chosen == chosen
    assert not any(m.training for m in (*model.modules(), *faster.modules()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(faster(x), model(x))
    norms = [layer for layer in faster.modules() if isinstance(layer, nn.BatchNorm2d)]
    if chosen == "as it was":
        assert report.certificate is None
        assert "an inference takes" in str(report)
    else:
        assert report.certificate.relative < 1e-4
        assert report.gradients is None
        assert "2.00 times as fast" in str(report)
        assert [type(layer) for layer in norms] == [bn.BatchNorm2d] * (make is preactivated)
        assert [layer.activation for layer in norms] == ["relu"] * (make is preactivated)
    wanted = torch.channels_last if "channels_last" in chosen else torch.contiguous_format
    assert faster[0].weight.is_contiguous(memory_format=wanted)


def test_inference_is_compiled_if_asked(monkeypatch):
    model, x = with_statistics(network()), torch.randn(4, 3, 10, 10)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    pretend(monkeypatch, "folded, channels_last, compiled")
    faster, report = bn.accelerate(model, x, steps=9, seconds=0, compile=True)
    names = [f"{name}{suffix}" for suffix in ("", ", compiled") for name in INFERENCE[1:]]
    assert [m.setting["contender"] for m in report.times] == ["as it was", *names]
    assert graphs
    assert not any("batch_norm" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    torch.testing.assert_close(faster(x), model(x))
    assert "torch.compile" in str(report)


def test_what_is_of_the_other_mode_is_refused():
    model, x = network(), torch.randn(4, 3, 10, 10)
    with pytest.raises(bn.BatchNormError, match=r"compile=True is for inference.*call model\.eval"):
        bn.accelerate(model, x, compile=True)
    with pytest.raises(bn.BatchNormError, match=r"loss= is for training.*call model\.train"):
        bn.accelerate(model.eval(), x, loss=torch.sum)
    with pytest.raises(bn.BatchNormError, match="optimizer= is for training"):
        bn.accelerate(model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def timed(**found):
    """Measurements of the ways that are named, beside a model that takes 100 s."""
    named = {"as it was": [100.0] * len(next(iter(found.values()))), **found}
    return tuple(bn.records.Measurement("time", {"contender": n}, tuple(s), "s") for n, s in named.items())


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [
        ([99.0] * 9, "fused"),  # little, but always
        ([50.0] * 5, "as it was"),  # too few to tell
        ([50.0] * 7 + [101.0] * 4, "as it was"),  # a large median gain, and a third of the steps slower
        ([50.0] * 10 + [101.0], "fused"),
        ([50.0] * 9 + [101.0] * 2, "as it was"),
        ([100.0] * 20, "as it was"),
        ([1.0] * 8 + [101.0] * 12, "as it was"),
        ([99.0] * 14 + [500.0] * 2, "fused"),  # other processes were busy in two of the steps
    ],
)
def test_only_what_noise_does_not_explain_is_a_gain(samples, chosen):
    assert timing.fastest(timed(fused=samples)) == chosen


def test_of_those_that_gain_the_largest_is_taken_and_a_layout_has_to_be_worth_it():
    assert timing.fastest(timed(fused=[80.0] * 12, channels_last=[60.0] * 12)) == "channels_last"
    assert timing.fastest(timed(fused=[80.0] * 12, channels_last=[79.0] * 12)) == "fused"
    mixed = [50.0] * 8 + [101.0] * 4
    assert timing.fastest(timed(fused=[80.0] * 12, channels_last=mixed)) == "fused"


def test_noise_alone_hardly_ever_moves_a_model():
    draw = torch.Generator().manual_seed(0)
    moved = 0
    for _ in range(300):
        was, *ways = (100 + 30 * torch.rand(4, 21, generator=draw)).tolist()
        times = timed(**dict(zip(("fused", "channels_last", "both"), ways, strict=True)))
        first = bn.records.Measurement("time", {"contender": "as it was"}, tuple(was), "s")
        moved += timing.fastest((first, *times[1:])) != "as it was"
    assert moved <= 6  # 2 % of 300


class Clock:
    """A clock that only moves when a module says that it works."""

    def __init__(self):
        self.now, self.noise = 0.0, 0.0
        self.draw = torch.Generator().manual_seed(0)

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds * (1 + self.noise * float(torch.rand((), generator=self.draw)))


class Costly(nn.Module):
    """A block that takes so long for each layout, with torch's BN layer or with ours."""

    clock, costs = Clock(), {}

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        last = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        Costly.clock.work(Costly.costs["ours" if type(self.bn) is bn.BatchNorm2d else "stock", last])
        return self.bn(self.conv(x))


@pytest.mark.parametrize(
    ("stock", "stock_last", "ours", "ours_last", "noise", "chosen"),
    [
        (1.0, 1.0, 1.0, 1.0, 0.5, "as it was"),
        (1.0, 1.2, 1.1, 1.3, 0.0, "as it was"),
        (1.0, 1.0, 0.98, 1.0, 0.5, "as it was"),  # a gain that the noise hides
        (1.0, 1.0, 0.5, 0.9, 0.3, "fused"),
        (1.0, 0.5, 0.9, 0.8, 0.3, "channels_last"),
        (1.0, 0.8, 0.9, 0.4, 0.3, "fused, channels_last"),
    ],
)
def test_with_a_clock_of_its_own(monkeypatch, stock, stock_last, ours, ours_last, noise, chosen):
    clock = Clock()
    clock.noise = noise
    monkeypatch.setattr(Costly, "clock", clock)
    monkeypatch.setattr(Costly, "costs", {("stock", False): stock, ("stock", True): stock_last,
                                          ("ours", False): ours, ("ours", True): ours_last})  # fmt: skip
    monkeypatch.setattr(timing, "clock", clock)
    model, x = Costly(), torch.randn(4, 3, 6, 6)
    faster, report = bn.accelerate(model, x, seconds=0, steps=21)
    assert [m.setting["contender"] for m in report.times] == WAYS
    assert report.chosen == chosen
    cost = {"ours": (ours, ours_last), "stock": (stock, stock_last)}["ours" if "fused" in chosen else "stock"]
    assert cost["channels_last" in chosen] <= stock
    assert all(relative < 1e-4 for _, relative, _ in apart(step(model, x), step(faster, x)).values())
    if noise == 0:
        medians = {m.setting["contender"]: m.median for m in report.times}
        expected = dict(zip(WAYS, (stock, ours, stock_last, ours_last), strict=True))
        assert medians == pytest.approx(expected)


def test_every_way_follows_every_other():
    order = []
    names = ["a", "b", "c"]
    timing.measure({name: lambda name=name: order.append(name) for name in names}, steps=3, warm_up=0, seconds=-1)
    assert ["".join(order[i : i + 3]) for i in range(0, 9, 3)] == ["abc", "bca", "cab"]
