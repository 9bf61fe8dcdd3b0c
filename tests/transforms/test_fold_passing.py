"""What stands between BN and a linear layer and lets a scale and a shift pass: exactly, or not at all."""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import Run, assert_folds, assert_left, drawn, made
from torch import nn

import batchnorm as bn

PASS = {
    "average": nn.AvgPool2d(2),
    "average, overhanging": nn.AvgPool2d(3, 2, ceil_mode=True),
    "average, padding left out": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "adaptive": nn.AdaptiveAvgPool2d((3, 2)),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest": nn.Upsample(scale_factor=2),
    "reflection": nn.ReflectionPad2d(2),
    "avg_pool2d": lambda y: F.avg_pool2d(y, 2),
    "avg_pool2d, padding left out": lambda y: F.avg_pool2d(y, 3, 1, 1, False, False),
    "adaptive_avg_pool2d": lambda y: F.adaptive_avg_pool2d(y, 2),
    "interpolate": lambda y: F.interpolate(y, size=(11, 5), mode="bicubic"),
    "mean": lambda y: y.mean((2, 3), keepdim=True),
    "mean of one axis": lambda y: torch.mean(y, -1, keepdim=True),
    "reshape": lambda y: y.flatten(2).unsqueeze(-1),
}
STOP = {
    "average of padding": (nn.AvgPool2d(3, 1, 1), "pads with zeros"),
    "avg_pool2d of padding": (lambda y: F.avg_pool2d(y, 3, 1, 1), "pads with zeros"),
    "average by another number": (nn.AvgPool2d(2, divisor_override=3), ""),
    "power average": (nn.LPPool2d(2, 2), ""),
    "zeros": (nn.ZeroPad2d(1), ""),
    "relu": (nn.ReLU(), ""),
    "mean of channels": (lambda y: y.mean(1, keepdim=True).expand(-1, 4, -1, -1), ""),
    "transpose": (lambda y: y.transpose(1, 2)[:, :4], ""),
    "rows": (lambda y: y.reshape(y.shape[0] * 2, 2, 8, 8).repeat(1, 2, 1, 1), ""),
    "softmax": (lambda y: y.softmax(1), ""),
}


def between(step):
    parts = {"step": step} if isinstance(step, nn.Module) else {}
    return (lambda m, y: m.step(y)) if parts else (lambda m, y: step(y)), parts


@pytest.mark.parametrize("name", PASS)
def test_backwards(name):
    run, parts = between(PASS[name])
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(run(m, m.conv(x)))), conv=nn.Conv2d(3, 4, 3, padding=1),
                             bn=nn.BatchNorm2d(4), **parts))  # fmt: skip
    assert_folds(model, drawn(2, 3, 8, 8))


@pytest.mark.parametrize("name", PASS)
def test_forwards(name):
    run, parts = between(PASS[name])
    model = made(lambda: Run(lambda m, x: m.conv(run(m, m.bn(x))), conv=nn.Conv2d(4, 3, 1), bn=nn.BatchNorm2d(4),
                             **parts))  # fmt: skip
    assert_folds(model, drawn(2, 4, 8, 8))


@pytest.mark.parametrize("name", STOP)
def test_neither_way(name):
    step, reason = STOP[name]
    run, parts = between(step)
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(run(m, m.conv(x)))), conv=nn.Conv2d(3, 4, 3, padding=1),
                             bn=nn.BatchNorm2d(4), **parts))  # fmt: skip
    assert_left(model, drawn(2, 3, 8, 8), "bn", reason or "stands before it")
    model = made(lambda: Run(lambda m, x: m.conv(run(m, m.bn(x))), conv=nn.Conv2d(4, 3, 1), bn=nn.BatchNorm2d(4),
                             **parts))  # fmt: skip
    assert_left(model, drawn(2, 4, 8, 8), "bn", reason or "follows")


def test_a_mean_of_the_channels_that_leaves_as_many_numbers():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(m.conv(x).mean(1))), conv=nn.Conv2d(3, 4, 1),
                             bn=nn.BatchNorm1d(4)))  # fmt: skip
    assert_left(model, drawn(2, 3, 4, 5), "bn", "mean (a function) stands before it")


def test_average_of_padding_lets_a_scale_alone_pass():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(4), nn.ReLU()))
    with torch.no_grad():
        model[2].running_mean.zero_()
        model[2].bias.zero_()
    assert_folds(model, drawn(2, 3, 8, 8))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(2),
                                  lambda y: F.max_pool2d(y, 3, 2, 1)])  # fmt: skip
def test_the_largest_stays_the_largest_if_no_scale_is_negative(pool):
    run, parts = between(pool)
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(run(m, m.conv(x)))), conv=nn.Conv2d(3, 4, 3),
                             bn=nn.BatchNorm2d(4), **parts))  # fmt: skip
    assert_folds(model, drawn(2, 3, 8, 8))
    with torch.no_grad():
        model.bn.weight[1] = 0.0
    assert_folds(model, drawn(2, 3, 8, 8))
    with torch.no_grad():
        model.bn.weight[1] = -0.1
    assert_left(model, drawn(2, 3, 8, 8), "bn", "keeps the largest, and some scales are negative")


def test_pooling_with_its_places_is_left():
    model = made(lambda: Run(lambda m, x: (p := F.max_pool2d(m.conv(x), 2, return_indices=True))[1] + m.bn(p[0]),
                             conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4)))  # fmt: skip
    assert_left(model, drawn(2, 3, 8, 8), "bn", "max_pool2d_with_indices (a function) stands before it")


def test_pooling_over_the_channels_of_an_unbatched_image():
    model = made(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.AvgPool2d(2), nn.Linear(4, 3)))
    assert_left(model, drawn(4, 4, 8), "0", "1 follows")


def test_global_pooling_into_the_classifier():
    model = made(lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                       nn.Dropout(), nn.Linear(4, 3)))  # fmt: skip
    assert_folds(model, drawn(2, 4, 5, 5))


def test_flattened_into_a_linear_layer():
    model = made(lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6, 3)))
    folded, _ = assert_folds(model, drawn(2, 4, 2, 3))
    assert type(folded[1]) is nn.Identity
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.BatchNorm1d(2 * 6), nn.ReLU()))
    assert_left(model, drawn(2, 3, 2, 3), "2", "1 (Flatten) stands before it")  # a scale for each position


@pytest.mark.parametrize(("turn", "back"), [
    (lambda y: y.transpose(1, 2), lambda y: y.transpose(1, 2)),
    (lambda y: torch.swapaxes(y, -1, 1), lambda y: y.swapdims(-1, 1)),
    (lambda y: y.permute(0, 2, 1), lambda y: y.permute((0, 2, 1))),
    (lambda y: y.permute(1, 2, 0), lambda y: y.permute(2, 0, 1)),
    (lambda y: torch.transpose(y, dim0=2, dim1=1), lambda y: torch.permute(y, dims=(0, -1, -2))),
])  # fmt: skip
def test_linear_layers_whose_channels_are_brought_to_axis_1(turn, back):
    model = made(lambda: Run(lambda m, x: torch.relu(back(m.bn(turn(m.fc(x))))), fc=nn.Linear(5, 4),
                             bn=nn.BatchNorm1d(4)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5))
    model = made(lambda: Run(lambda m, x: m.fc(back(m.bn(turn(torch.relu(x))))), fc=nn.Linear(4, 5),
                             bn=nn.BatchNorm1d(4)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 4))


def test_linear_layers_of_images_with_channels_last_by_hand():
    model = made(lambda: Run(lambda m, x: m.conv(m.bn(m.fc(x).permute(0, 3, 1, 2))), fc=nn.Linear(5, 4),
                             bn=nn.BatchNorm2d(4), conv=nn.Conv2d(4, 2, 3, padding=1)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 6, 5))


def test_there_and_back_before_a_convolution():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(m.conv(x).transpose(1, 2).flatten(0, 1))),
                             conv=nn.Conv1d(3, 4, 1), bn=nn.BatchNorm1d(4)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5))


@pytest.mark.parametrize(("forward", "shape", "reason"), [
    (lambda m, x: m.bn(m.fc(x).permute(1, 0, 2)), (4, 2, 5), "fc is linear in the last axis, and this layer"),
    (lambda m, x: m.bn(m.conv(x).transpose(1, 2)), (2, 5, 6), "transpose (a function) stands before it"),
    (lambda m, x: m.bn(m.conv(x).transpose(0, 1)), (4, 5, 6), "transpose (a function) stands before it"),
    (lambda m, x: m.fc5(m.bn(x).transpose(0, 2)), (5, 4, 3), "normalises axis 1"),
    (lambda m, x: m.conv4(m.bn(x).transpose(1, 2)), (2, 4, 4), "conv4 has its channels on axis 1"),
    (lambda m, x: m.pool(m.bn(x).transpose(1, 2)), (2, 4, 4), "pool follows"),
])  # fmt: skip
def test_other_axes_are_refused(forward, shape, reason):
    model = made(lambda: Run(lambda m, x: forward(m, x).relu(), fc=nn.Linear(5, 4), conv=nn.Conv1d(5, 4, 3),
                             fc5=nn.Linear(5, 4), conv4=nn.Conv1d(4, 4, 1), pool=nn.AvgPool1d(2),
                             bn=nn.BatchNorm1d(4)))  # fmt: skip
    assert_left(model, drawn(*shape), "bn", reason)


def branches(forward, **more):
    return made(lambda: Run(forward, a=nn.Conv2d(3, 2, 1), b=nn.Conv2d(3, 4, 3, padding=1, bias=False),
                            bn=nn.BatchNorm2d(6), **more))  # fmt: skip


@pytest.mark.parametrize("cat", [
    lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.concat((b, a), dim=-3), lambda a, b: torch.cat([a, b], axis=1)
])  # fmt: skip
def test_each_branch_of_a_cat_takes_its_part(cat):
    _, report = assert_folds(branches(lambda m, x: torch.relu(m.bn(cat(m.a(x), m.b(x))))), drawn(2, 3, 5, 5))
    assert "a (before it)" in str(report.changes[0])
    assert "b (before it)" in str(report.changes[0])


@pytest.mark.parametrize(("forward", "reason"), [
    (lambda m, x: m.bn(torch.cat([m.a(x), F.relu(m.b(x))], 1)), "cat (a function) stands before it, and relu"),
    (lambda m, x: m.bn(torch.cat([y := m.a(x), y, m.a(x * 2)], 1)), "cat (a function) stands before it"),
    (lambda m, x: m.bn(torch.cat([m.a(x), m.a(x), m.a(x)], 1)), "a would have to be scaled in several ways"),
    (lambda m, x: m.bn(torch.cat([m.a(x), m.c(x)], 1)) + m.c(x).mean(), "c is called 2 times"),
    (lambda m, x: m.bn(torch.cat([m.c(x)[:1], m.c(x)[1:]], 0).repeat(1, 2, 1, 1)[:, :6]), "getitem"),
    (lambda m, x: m.bn(torch.cat([m.c(x), m.a(x)], 1) + torch.cat([m.a(x), m.c(x)], 1)), "several ways"),
])  # fmt: skip
def test_cats_that_stay(forward, reason):
    assert_left(branches(forward, c=nn.Conv2d(3, 4, 1)), drawn(2, 3, 5, 5), "bn", reason)


def test_into_what_follows_a_cat():
    model = made(lambda: Run(lambda m, x: m.conv(torch.cat([x, m.bn(torch.relu(x))], 1)), bn=nn.BatchNorm2d(3),
                             conv=nn.Conv2d(6, 4, 3)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5, 5))
    model = made(lambda: Run(lambda m, x: m.conv(torch.cat([y := m.bn(torch.relu(x)), m.pool(y)], 1)),
                             pool=nn.MaxPool2d(3, 1, 1), bn=nn.BatchNorm2d(3), conv=nn.Conv2d(6, 4, 3)))  # fmt: skip
    assert_left(model, drawn(2, 3, 5, 5), "bn", "conv reads it twice")


def test_of_a_sum_every_term_takes_the_scale_and_one_the_shift():
    def make(forward):
        return made(lambda: Run(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 3, padding=1), bn=nn.BatchNorm2d(4)))

    def in_place(m, x):
        y = m.a(x)
        y += m.b(x)
        return torch.relu(m.bn(y))

    for forward in (lambda m, x: torch.relu(m.bn(m.a(x) + m.b(x))), in_place):
        assert_folds(make(forward), drawn(2, 3, 5, 5))
    for forward, reason in (
        (lambda m, x: torch.relu(m.bn(torch.add(m.a(x), m.b(x), alpha=2))), "add (a function) stands before it"),
        (lambda m, x: torch.relu(m.bn(m.a(x) + m.b(x)[:1])), "add (a function) stands before it"),
        (lambda m, x: torch.relu(m.bn(m.a(x) + 1.0)), "add (a function) stands before it"),
        (lambda m, x: torch.relu(m.bn(m.a(x) - m.b(x))), "sub (a function) stands before it"),
        (lambda m, x: torch.relu(m.bn((y := m.a(x)) + y)), "add (a function) stands before it"),
    ):
        assert_left(make(forward), drawn(2, 3, 5, 5), "bn", reason)


def test_float16_that_a_mean_makes_float32():
    model = made(lambda: Run(lambda m, x: torch.relu(m.bn(m.conv(x).mean((2, 3), dtype=torch.float64))),
                             conv=nn.Conv2d(3, 4, 1).float(), bn=nn.BatchNorm1d(4)), torch.float32)  # fmt: skip
    model.bn.double()
    _, report = bn.fold(model, drawn(2, 3, 5, 5, dtype=torch.float32))
    assert "mean (a function) stands before it" in report.left["bn"]
