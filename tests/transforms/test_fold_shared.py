"""A layer that several places share: a copy for each, or the reason why not."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from fold_cases import Run, assert_folds, assert_left, drawn, made, outputs
from torch import nn

import batchnorm as bn
from batchnorm.transforms.clones import Moved, memory_of
from zoo import perturb


class ConvModule(nn.Module):
    def __init__(self, conv, norm):
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Heads(nn.Module):
    """A detection head: the convolutions are those of all levels, the BN layers each level's own."""

    def __init__(self, levels=3, depth=2, norm=nn.BatchNorm2d):
        super().__init__()
        convs = [nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(depth)]
        self.towers = nn.ModuleList(nn.Sequential(*[ConvModule(c, norm(4)) for c in convs]) for _ in range(levels))

    def forward(self, x):
        return {str(i): tower(x[:, :, :: i + 1, :: i + 1]) for i, tower in enumerate(self.towers)}


class Looped(nn.Module):
    """The same, written as a loop over lists: one place in the code for all levels."""

    def __init__(self, norm=nn.BatchNorm2d, conv=None):
        super().__init__()
        self.conv = conv or nn.Conv2d(4, 6, 3, padding=1)
        self.drop = nn.Dropout2d()
        self.norms = nn.ModuleList(norm(6) for _ in range(3))

    def forward(self, x, order=(0, 1, 2)):
        return {str(i): self.norms[i](self.drop(self.conv(x[:, :, :: i + 1]))) for i in order}


def test_each_holder_gets_a_copy():
    model, x = made(Heads), drawn(2, 4, 9, 9)
    folded, report = assert_folds(model, x)
    convs = [tower[0].conv for tower in folded.towers]
    assert len({id(conv) for conv in convs}) == len({conv.weight.data_ptr() for conv in convs}) == 3
    assert {type(tower[1].norm) for tower in folded.towers} == {nn.Identity}
    said = [str(change) for change in report.changes]
    more = memory_of(model.towers[0][0].conv)
    assert said[0].endswith(f"into towers.0.0.conv (before it), a copy of the shared layer ({more} more)")
    assert said[2].endswith(f"into towers.1.0.conv (before it), a copy of the shared layer ({more} more)")
    assert said[4].endswith("into towers.2.0.conv (before it)")  # the last one has what is left
    assert sum("more" in each for each in said) == 4


def test_the_result_is_its_own():
    model, x = made(Heads), drawn(2, 4, 9, 9)
    folded, _ = bn.fold(model, x)
    state = folded.state_dict()
    assert {k for k in state if k.endswith("weight")} == {
        f"towers.{i}.{j}.conv.weight" for i in range(3) for j in (0, 1)
    }
    other = copy.deepcopy(folded)
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(state)
    for copied in (other, pickle.loads(pickle.dumps(folded))):
        assert all(torch.equal(a, b) for a, b in zip(outputs(copied, x), outputs(folded, x), strict=True))


def test_a_call_without_a_norm_keeps_the_layer_as_it_was():
    def make():
        conv = nn.Conv2d(3, 3, 1)
        return Run(lambda m, x: m.a(x) + m.b(x) + m.c(x), a=nn.Sequential(conv, nn.BatchNorm2d(3)),
                   b=nn.Sequential(conv, nn.ReLU()), c=nn.Sequential(conv, nn.BatchNorm2d(3)))  # fmt: skip

    model = made(make)
    folded, _ = assert_folds(model, drawn(2, 3, 5, 5))
    assert torch.equal(folded.b[0].weight, model.b[0].weight)


def test_two_norms_after_a_copy():
    def make():
        conv = nn.Conv2d(3, 3, 1)
        return Run(lambda m, x: m.a(x) + m.b(x), a=nn.Sequential(conv, nn.BatchNorm2d(3), nn.BatchNorm2d(3)),
                   b=nn.Sequential(conv, nn.BatchNorm2d(3)))  # fmt: skip

    assert_folds(made(make), drawn(2, 3, 5, 5))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, bn.BatchNorm2d, lambda c: nn.BatchNorm2d(c, affine=False),
                                  lambda c: bn.BatchNorm2d(c, activation="relu")])  # fmt: skip
def test_a_loop_over_levels(norm):
    model, x = made(lambda: Looped(norm)), drawn(2, 4, 9, 9)
    folded, report = assert_folds(model, x)
    assert type(folded.conv) is nn.Identity
    assert all(type(each) in (nn.Conv2d, Moved) for each in folded.norms)
    with torch.no_grad():  # distinguished by the BN layer that follows, not by the order of the calls
        for order in ((2, 0), (1,), (1, 1)):
            for a, b in zip(model(x, order).values(), folded(x, order).values(), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    more = memory_of(model.conv)
    said = [str(change).partition("into ")[2] for change in report.changes]
    assert said == ["conv (before it), which moved here", *[f"conv (before it), a copy of it, {more} more"] * 2]
    fresh = copy.deepcopy(folded)
    fresh.load_state_dict(folded.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(outputs(fresh, x), outputs(folded, x), strict=True))


class WithChildren(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_a_loop_over_layers_that_finish():
    folded, _ = assert_folds(made(lambda: Looped(WithChildren)), drawn(2, 4, 9, 9))
    assert [type(part) for part in folded.norms[0]] == [nn.Conv2d, nn.SiLU]


def test_a_residual_goes_along():
    def forward(m, x):
        return m.a(m.conv(x), x) + m.b(m.conv(x * 2), residual=x)

    model = made(lambda: Run(forward, conv=nn.Conv2d(3, 3, 1), a=bn.BatchNorm2d(3, activation="relu"),
                             b=bn.BatchNorm2d(3)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5, 5))


def test_a_norm_after_a_moved_layer():
    model = made(lambda: Run(lambda m, x: m.c(m.a(m.conv(x))) + m.b(m.conv(x)), conv=nn.Conv2d(3, 4, 3),
                             a=nn.BatchNorm2d(4), b=nn.BatchNorm2d(4), c=nn.BatchNorm2d(4)))  # fmt: skip
    folded, _ = assert_folds(model, drawn(2, 3, 5, 5))
    assert type(folded.a) is nn.Conv2d
    assert type(folded.c) is nn.Identity


@pytest.mark.parametrize(("forward", "reason"), [
    (lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x)) + m.conv(x), "its output goes to add"),
    (lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x)) + m.b(x), "a is"),
    (lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x)).mul(m.b.running_mean[0]), "b stays, for its tensors are also read"),
    (lambda m, x: m.a(y := m.conv(x)) * y.shape[1] + m.b(m.conv(x)), "the model reads the size of its output"),
    (lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x).relu()), "its output goes to relu"),
    (lambda m, x: {"y": m.a(m.conv(x)) + m.b(y := m.conv(x)), "z": y}, "the model returns its output"),
    (lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x)) + m.c(m.conv(x)), "c stays, for it has no running statistics"),
])  # fmt: skip
def test_refused(forward, reason):
    model = made(lambda: Run(forward, conv=nn.Conv2d(3, 3, 1), a=nn.BatchNorm2d(3), b=nn.BatchNorm2d(3),
                             c=nn.BatchNorm2d(3, track_running_stats=False)))  # fmt: skip
    if reason == "a is":
        reason = "b does not read it alone"
    _, report = assert_left(model, drawn(2, 3, 5, 5), "a", reason)
    assert "times, and not always for this layer: " in report.left["a"]


def test_a_layer_to_be_left_keeps_the_others():
    model = made(Looped)
    folded, report = bn.fold(model, drawn(2, 4, 9, 9), leave=["norms.1"])
    assert report.left["norms.0"].endswith("follows: the model returns its output")
    assert (
        "conv is called 3 times, and not always for this layer: norms.1 stays, for it was to be left"
        in report.left["norms.0"]
    )
    assert type(folded.conv) is nn.Conv2d


def test_no_copies_if_none_are_wanted():
    for make in (Heads, Looped):
        model = made(make)
        folded, report = bn.fold(model, drawn(2, 4, 9, 9), clone=False)
        assert not report.changes
        assert sum(p.numel() for p in folded.parameters()) == sum(p.numel() for p in model.parameters())


def test_one_module_that_has_the_layer_twice_cannot_tell():
    def make():
        conv = nn.Conv2d(3, 3, 1)
        return Run(lambda m, x: m.a(m.one(x)) + m.b(m.two(x)) + F.relu(m.one(x)), one=conv, two=conv,
                   a=nn.BatchNorm2d(3), b=nn.BatchNorm2d(3))  # fmt: skip

    assert_left(made(make), drawn(2, 3, 5, 5), "a", "its output goes to relu")


def test_one_module_that_has_the_layer_twice_for_one_norm():
    def make():
        conv = nn.Conv2d(3, 3, 1)
        pair = Run(lambda m, x: m.bn(m.one(x)) + m.bn(m.two(x * 2)), one=conv, two=conv, bn=nn.BatchNorm2d(3))
        return Run(lambda m, x: m.a(x) + m.b(x), a=pair, b=nn.Sequential(conv, nn.ReLU()))

    folded, _ = assert_folds(made(make), drawn(2, 3, 5, 5))
    assert folded.a.one is folded.a.two is not folded.b[0]


def test_float32_and_a_convolution_in_channels_last():
    model = perturb(Heads()).eval().to(memory_format=torch.channels_last)
    x = drawn(2, 4, 9, 9, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    folded, report = bn.fold(model, x)
    assert report.certificate.relative < 1e-6
    assert all(tower[0].conv.weight.is_contiguous(memory_format=torch.channels_last) for tower in folded.towers)
