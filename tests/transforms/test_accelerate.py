"""accelerate: the function is kept, the times are reported, and whatever layout is chosen goes all the way."""

import copy
import json

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.transforms import accelerate as module
from batchnorm.transforms.accelerate import in_layout
from batchnorm.transforms.gradients import apart, step


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))


def pretend(monkeypatch, fastest):
    """Let one contender be the fastest, whatever the clock says."""

    def measure(contenders, steps, warm_up=2, seconds=0.0):
        for function in contenders.values():
            function()
        seconds = {name: 1.0 if name == fastest else 2.0 for name in contenders}
        return tuple(bn.records.Measurement("time", {"contender": n}, (s,) * steps, "s") for n, s in seconds.items())

    monkeypatch.setattr(module, "measure", measure)


def test_the_function_is_kept_and_the_ratio_reported():
    model, x = network(), torch.randn(4, 3, 10, 10)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    faster, report = bn.accelerate(model, x, steps=3, seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in faster.state_dict().items())
    assert all(relative < 1e-4 for _, relative, _ in apart(step(model, x), step(faster, x)).values())
    assert [m.setting["contender"] for m in report.times] == ["as it was", "fused", "fused, channels_last"]
    assert all(len(m.samples) == 3 and min(m.samples) > 0 for m in report.times)
    assert report.speedup == report.speedups.median > 0
    assert "faster (" in str(report)
    assert json.loads(report.to_json())["chosen"] == report.chosen


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_fastest_is_chosen(monkeypatch, layout):
    other = {"contiguous": "channels_last", "channels_last": "contiguous"}[layout]
    model, x = in_layout(network(), layout), torch.randn(4, 3, 10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    for chosen, kept in ((f"fused, {other}", other), ("fused", layout), ("as it was", layout)):
        pretend(monkeypatch, chosen)
        mine = copy.deepcopy(optimizer)
        twin = nn.Sequential(*model)
        mine.param_groups[0]["params"], state = list(twin.parameters()), list(mine.state.values())
        mine.state.clear()
        mine.state.update(zip(twin.parameters(), state, strict=True))
        faster, report = bn.accelerate(twin, x, steps=2, seconds=0, optimizer=mine)
        assert report.chosen == chosen
        assert report.speedup == (1.0 if chosen == "as it was" else 2.0)
        wanted = torch.channels_last if kept == "channels_last" else torch.contiguous_format
        weight = faster[0].weight
        assert weight.is_contiguous(memory_format=wanted)
        assert mine.param_groups[0]["params"][0] is weight
        assert mine.state[weight]["momentum_buffer"].is_contiguous(memory_format=wanted)
        assert type(faster[1]) is (nn.BatchNorm2d if chosen == "as it was" else bn.BatchNorm2d)
        assert ("memory layout" in str(report)) == (kept != layout)
        assert bool(report.changes) == (chosen != "as it was")
        torch.testing.assert_close(faster(x), model(x))
        assert faster(x).is_contiguous(memory_format=wanted)


def test_a_model_without_convolutions_has_one_layout():
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU())
    losses = []

    def loss(y):
        losses.append(y.shape)
        return y.sum()

    _, report = bn.accelerate(model, torch.randn(8, 3), loss=loss, steps=2, seconds=0)
    assert [m.setting["contender"] for m in report.times] == ["as it was", "fused"]
    assert len(losses) == 2 * (2 + 2)


def test_a_model_in_evaluation_mode_stays_in_it():
    model = network().eval()
    faster, _ = bn.accelerate(model, torch.randn(4, 3, 10, 10), steps=1, seconds=0)
    assert not any(m.training for m in faster.modules())
