"""BN layers that stay, as a scale and a shift."""

import copy
import pickle

import pytest
import torch
from fold_cases import Run, count, drawn, made, outputs
from torch import nn

import batchnorm as bn
from batchnorm.transforms import leftovers as module_of_leftovers
from batchnorm.transforms.leftovers import ScaleShift, Seen
from zoo import IMAGE, ZOO


def stays(norm=nn.BatchNorm2d, channels=3):
    return made(lambda: Run(lambda m, x: torch.relu(m.bn(torch.relu(x))), bn=norm(channels)))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 7), (2, 3, 5, 4), (2, 3, 3, 2, 4)])
def test_the_layer(at_once, shape):
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    layer = made(lambda: norm(3))
    affine = module_of_leftovers.affine_of(layer)
    scaled = ScaleShift(affine.scale, affine.shift, len(shape), at_once)
    x = drawn(*shape)
    torch.testing.assert_close(scaled(x), layer(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled.train()(x), layer(x), rtol=1e-12, atol=1e-12)
    if len(shape) == 4:
        last = x.contiguous(memory_format=torch.channels_last)
        assert scaled(last).is_contiguous(memory_format=torch.channels_last)
    y = scaled(x.clone().requires_grad_())
    assert y.requires_grad


@pytest.mark.parametrize("name", ["pre-activation", "densenet"])
def test_all_of_them(name):
    model, x = made(ZOO[name].make), drawn(*IMAGE)
    folded, report = bn.fold(model, x, leftovers="scale")
    assert count(folded) == 0
    rewritten = [change.path for change in report.changes if change.what == "rewritten"]
    assert rewritten == list(report.left)  # each still has its reason
    assert len(rewritten) == ZOO[name].norms - ZOO[name].folds
    for a, b in zip(outputs(model, x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    folded.train()  # nothing in it depends on the batch
    for a, b in zip(outputs(model, x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    other = copy.deepcopy(folded)
    other.load_state_dict(folded.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(folded))(x), other(x))


@pytest.mark.parametrize("took", ["layer", "once", "twice"])
def test_the_faster_one_is_taken(took, monkeypatch):
    """The clock is ours: whichever is said to be faster stands there in the end."""

    def measure(contenders, steps):
        for run in contenders.values():
            run()
        spent = {"": 3.0, "once": 4.0, "twice": 4.0} | {"" if took == "layer" else took: 1.5}
        return [bn.records.Measurement("time", {"contender": name}, (spent[name],) * steps) for name in contenders]

    monkeypatch.setattr(module_of_leftovers, "measure", measure)
    model, x = stays(), drawn(2, 3, 5, 5)
    folded, report = bn.fold(model, x, leftovers="measure")
    if took == "layer":
        assert isinstance(folded.bn, nn.BatchNorm2d)
        assert not report.changes
    else:
        assert folded.bn.at_once is (took == "once")
        assert str(report.changes[0]).endswith("rewritten BatchNorm2d -> a scale and a shift, 2.0 times as fast here")
    assert set(report.left) == {"bn"}
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_real_clock():
    folded, report = bn.fold(stays(), drawn(2, 3, 5, 5), leftovers="measure")
    assert isinstance(folded.bn, ScaleShift) == bool(report.changes)


def test_by_default_they_are_kept():
    folded, report = bn.fold(stays(), drawn(2, 3, 5, 5))
    assert isinstance(folded.bn, nn.BatchNorm2d)
    assert not report.changes


@pytest.mark.parametrize("norm", [
    lambda c: bn.BatchNorm2d(c, activation="relu"),
    lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    lambda c: bn.BatchNorm2d(c, statistics="batch"),
])  # fmt: skip
def test_what_is_more_than_a_scale_and_a_shift_is_kept(norm):
    folded, report = bn.fold(stays(norm), drawn(2, 3, 5, 5), leftovers="scale")
    assert count(folded) == 1
    assert not report.changes


def test_layers_to_be_left_and_layers_not_reached_are_kept():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(torch.relu(x))), bn=nn.BatchNorm2d(3), no=nn.BatchNorm2d(3)))
    folded, _ = bn.fold(model, drawn(2, 3, 5, 5), leftovers="scale", leave=["bn"])
    assert count(folded) == 2


def test_several_ways_to_call_it():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(x)) + torch.relu(m.bn(input=x[:, :, 0])).unsqueeze(2),
                             bn=nn.BatchNorm1d(3)))  # fmt: skip
    folded, _ = bn.fold(model, drawn(2, 3, 5), leftovers="scale")
    assert count(folded) == 1
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(x)) + torch.relu(m.bn(input=x[:, :, :1])),
                             bn=nn.BatchNorm1d(3)))  # fmt: skip
    folded, _ = bn.fold(model, drawn(2, 3, 5), leftovers="scale")
    assert count(folded) == 0


def test_small_types_are_kept():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(torch.relu(x))), bn=nn.BatchNorm2d(3)), torch.bfloat16)
    folded, _ = bn.fold(model, drawn(2, 3, 5, 5, dtype=torch.bfloat16), leftovers="scale")
    assert count(folded) == 1


def test_one_pass_where_the_channels_are_innermost_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(module_of_leftovers, "_faster", lambda norm, seen: (None, ""))
    x = drawn(2, 3, 5, 5)
    for given, at_once in ((x, False), (x.contiguous(memory_format=torch.channels_last), True)):
        folded, report = bn.fold(stays(), given, leftovers="scale")
        assert folded.bn.at_once is at_once
        assert str(report.changes[0]).endswith("-> a scale and a shift")


def test_what_is_drawn_is_like_what_was_seen():
    x = drawn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    made_up = Seen(tuple(x.shape), x.stride(), x.dtype, x.device).drawn()
    assert (made_up.shape, made_up.stride(), made_up.dtype) == (x.shape, x.stride(), x.dtype)
    assert float(made_up.std()) > 0.5


def test_a_word_that_is_none():
    with pytest.raises(bn.BatchNormError, match="fold: leftovers is 'drop'; use one of 'keep', 'measure', 'scale'"):
        bn.fold(stays(), drawn(2, 3, 5, 5), leftovers="drop")


def test_it_can_be_exported():
    folded, _ = bn.fold(stays(), drawn(2, 3, 5, 5), leftovers="scale")
    x = drawn(2, 3, 5, 5)
    program = torch.export.export(folded, (x,))
    torch.testing.assert_close(program.module()(x), folded(x))
