"""Networks, and the layers beside a BN layer that take it up."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fold_cases import Run, assert_folds, assert_left, count, drawn, folded_by_fx, made, measured, outputs, without_beta
from torch import nn

import batchnorm as bn
from peer_models import QUICK, SUBJECTS, TRANSFORMERS_WITHOUT, subject
from zoo import IMAGE, ZOO, ConvBN, perturb

# ---- whole networks


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name):
    subject = ZOO[name]
    model = made(subject.make)
    assert count(model) == subject.norms
    folded, report = bn.fold(model, drawn(*subject.shape))
    assert len(report.changes) == subject.folds
    assert len(report.left) == subject.norms - subject.folds
    assert report.certificate.relative < 1e-10
    for seed in range(2):
        x = torch.randn(subject.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for a, b in zip(outputs(model, x), outputs(folded, x), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_zoo_in_float32(name, layout):
    subject = ZOO[name]
    model, x = made(subject.make, torch.float32), drawn(*subject.shape, dtype=torch.float32)
    if layout == torch.channels_last:
        if x.dim() != 4:
            pytest.skip("channels_last is for images")
        model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    folded, report = bn.fold(model, x)
    assert report.certificate.relative < 1e-5
    for a, b in zip(outputs(model, x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ZOO)
def test_at_least_as_many_as_torch_fx(name):
    model = made(ZOO[name].make)
    theirs = folded_by_fx(model)
    assert (theirs is None) == (name == "functional")
    theirs = theirs or 0
    assert ZOO[name].folds >= theirs


def assert_row(row):
    assert row.float32 < 1e-4
    assert row.float64 < 1e-10
    assert row.folded >= (row.by_fx or 0)
    assert all(row.left.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), QUICK)
def test_some_models_of_torchvision_timm_and_transformers(family, name):
    row = measured(family, name)
    assert_row(row)
    assert row.folded == row.norms  # all of these fold whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), SUBJECTS)
def test_the_models_of_torchvision_timm_and_transformers(family, name):
    assert_row(measured(family, name))


def test_the_page_lists_them_all():
    page = (Path(__file__).parents[2] / "docs" / "zoo-fold.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| t")]
    assert [row[0].split()[-1] for row in rows] == [name for _, name in SUBJECTS]
    for _, norms, folded, fx, float32, float64, _ in rows:
        assert int(norms) >= int(folded) >= (0 if fx == "-" else int(fx))
        assert float(float32) < 1e-4
        assert float(float64) < 1e-10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS_WITHOUT)
def test_models_without_batch_norm(name):
    model, x = subject("transformers", name)
    with pytest.raises(bn.BatchNormError, match="no BN layer to fold"):
        bn.fold(model, x)


# ---- the layer before


CONVOLUTIONS = [
    (nn.Conv1d, nn.BatchNorm1d, (2, 4, 9)), (nn.Conv2d, nn.BatchNorm2d, (2, 4, 7, 6)),
    (nn.Conv3d, nn.BatchNorm3d, (2, 4, 5, 4, 6)),
]  # fmt: skip
TRANSPOSED = [
    (nn.ConvTranspose1d, nn.BatchNorm1d, (2, 4, 5)), (nn.ConvTranspose2d, nn.BatchNorm2d, (2, 4, 3, 5)),
    (nn.ConvTranspose3d, nn.BatchNorm3d, (2, 4, 3, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("conv", "norm", "shape"), CONVOLUTIONS)
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"groups": 2}, {"groups": 4, "padding": 1}, {"stride": 2, "dilation": 2, "padding": 2},
    {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"},
])  # fmt: skip
def test_convolutions(conv, norm, shape, options):
    folded, _ = assert_folds(made(lambda: nn.Sequential(conv(4, 8, 3, **options), norm(8))), drawn(*shape))
    assert type(folded[0]) is conv
    assert type(folded[1]) is nn.Identity
    assert folded[0].bias is not None


@pytest.mark.parametrize(("conv", "norm", "shape"), TRANSPOSED)
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"groups": 2}, {"groups": 4}, {"stride": 2, "output_padding": 1, "groups": 2},
    {"dilation": 2, "padding": 1, "groups": 2},
])  # fmt: skip
def test_transposed_convolutions(conv, norm, shape, options):
    assert_folds(made(lambda: nn.Sequential(conv(4, 8, 3, **options), norm(8))), drawn(*shape))


def test_a_transposed_convolution_with_an_output_size():
    model = made(lambda: Run(lambda m, x: m.bn(m.up(x, output_size=[8, 8])), up=nn.ConvTranspose2d(3, 4, 3, 2, 1),
                             bn=nn.BatchNorm2d(4)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 4, 4))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_linear(bias, affine):
    make = lambda: nn.Sequential(nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6, affine=affine))  # noqa: E731
    assert_folds(made(make), drawn(5, 4))


def test_linear_on_three_axes_is_refused():
    model = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))  # as many steps as channels: it would run
    assert_left(model, drawn(2, 4, 4), "1", "0 is linear in the last axis")


@pytest.mark.parametrize("arrange", [
    lambda y: y.flatten(0, 1), lambda y: y.reshape(-1, 4), lambda y: y.view(-1, 4),
    lambda y: F.dropout(y, 0.5, False).flatten(0, 1),
])  # fmt: skip
def test_linear_whose_rows_are_arranged_anew(arrange):
    model = made(
        lambda: Run(lambda m, x: m.bn(arrange(m.fc(x))).reshape(2, 3, 4), fc=nn.Linear(5, 4), bn=nn.BatchNorm1d(4))
    )
    assert_folds(model, drawn(2, 3, 5))


@pytest.mark.parametrize(("forward", "shape", "reason"), [
    (lambda m, x: m.bn(m.fc(x).view(4, 4, 4)), (16, 5), "view (a function) stands before it"),  # the wrong axis
    (lambda m, x: m.bn(m.fc(x).reshape(-1, 2, 4).flatten(1).reshape(-1, 4)), (4, 5), "reshape (a function)"),
    (lambda m, x: m.bn(m.fc(x).t()), (4, 5), "t (a function) stands before it"),
    (lambda m, x: m.bn(m.conv(x).reshape(4, 4)), (2, 2, 4), "reshape (a function) stands before it"),
    (lambda m, x: m.bn(F.relu(m.fc(x)).flatten(0, 1)), (2, 2, 5), "flatten (a function) stands before it"),
])  # fmt: skip
def test_other_arrangements_are_refused(forward, shape, reason):
    model = made(lambda: Run(forward, fc=nn.Linear(5, 4), conv=nn.Conv1d(2, 2, 1), bn=nn.BatchNorm1d(4)))
    assert_left(model, drawn(*shape), "bn", reason)


def test_a_convolution_without_a_batch_axis_is_refused():
    model = made(lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)))
    assert_left(model, drawn(4, 8), "1", "0 is used without a batch axis")
    after = made(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 1)))
    assert_left(after, drawn(4, 4), "0", "1 is used without a batch axis")


def test_norm_after_norm():
    folded, _ = assert_folds(
        made(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.ReLU())), drawn(5, 3), ["0"]
    )
    assert type(folded[1]) is nn.Identity


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(3, affine=False), lambda: without_beta(nn.BatchNorm1d(3))])
def test_norm_after_a_norm_that_lacks_gamma_or_beta(norm):
    model = made(lambda: nn.Sequential(norm(), nn.BatchNorm1d(3), nn.ReLU()))
    folded, _ = assert_folds(model, drawn(5, 3), ["0"])
    assert folded[0].weight is not None
    assert folded[0].affine
    copy.deepcopy(folded).load_state_dict(folded.state_dict())


def test_one_fold_opens_the_way_for_another():
    model = made(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert_folds(model, drawn(5, 3))


def test_the_order_of_the_run_counts_not_that_of_the_names():
    model = made(lambda: Run(lambda m, x: m.b(m.a(m.conv(x))), b=nn.BatchNorm2d(4), a=nn.BatchNorm2d(4),
                             conv=nn.Conv2d(3, 4, 3)))  # fmt: skip
    _, report = assert_folds(model, drawn(2, 3, 5, 5))
    assert report.paths == ("a", "b")


def test_past_what_does_nothing_in_evaluation():
    model = made(lambda: Run(lambda m, x: m.bn(F.dropout(m.drop(m.conv(x)), 0.5, m.training).contiguous()),
                             conv=nn.Conv2d(3, 4, 3), drop=nn.Dropout2d(), bn=nn.BatchNorm2d(4)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5, 5))


# ---- the layer after


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 2}, {"padding": 1, "padding_mode": "circular"},
                                     {"padding": "valid"}, {"padding": 2, "padding_mode": "replicate"}])  # fmt: skip
def test_into_the_convolution_after(options):
    model = made(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 6, 3, **options)))
    assert_folds(model, drawn(2, 4, 6, 6))


@pytest.mark.parametrize("padding", [1, "same"])
def test_padding_keeps_a_shift_out(padding):
    model = made(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=padding)))
    assert_left(model, drawn(2, 4, 6, 6), "0", "1 pads with zeros")
    with torch.no_grad():  # without a shift there is nothing to reach the border
        model[0].bias.copy_(model[0].weight * model[0].running_mean / (model[0].running_var + model[0].eps).sqrt())
        model[0].running_mean.zero_()
        model[0].bias.zero_()
    assert_folds(model, drawn(2, 4, 6, 6))


def test_same_padding_of_a_pointwise_convolution_pads_nothing():
    assert_folds(made(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1, padding="same"))), drawn(2, 4, 5, 5))


def test_into_several_layers_after():
    model = made(lambda: Run(lambda m, x: m.a(y := m.bn(x)) + m.b(y), bn=nn.BatchNorm1d(4), a=nn.Linear(4, 3),
                             b=nn.Linear(4, 3, bias=False)))  # fmt: skip
    assert_folds(model, drawn(5, 4))


def test_the_wrong_axis_after_is_refused():
    model = made(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert_left(model, drawn(2, 4, 4), "0", "1 is linear in the last axis")


@pytest.mark.parametrize(("forward", "reason"), [
    (lambda m, x: m.fc(m.fc(m.bn(x))), "fc is called several times"),
    (lambda m, x: (y := m.bn(x)) + m.fc(y), "add follows"),
    (lambda m, x: {"y": (y := m.bn(x)), "z": m.fc(y)}, "the model returns its output"),
    (lambda m, x: m.fc(m.bn(m.bn(x))), "it is called several times"),
    (lambda m, x: [m.bn(x), m.fc(x)][1], "nothing reads its output"),
    (lambda m, x: m.fc(m.bn(x)) @ m.fc.weight, "the weight of fc is also read by matmul"),
])  # fmt: skip
def test_what_follows_may_forbid_it(forward, reason):
    model = made(lambda: Run(forward, bn=nn.BatchNorm1d(4), fc=nn.Linear(4, 4)))
    assert_left(model, drawn(5, 4), "bn", reason)


# ---- numbers


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_small_types(dtype, tolerance):
    model = made(ZOO["resnet-basic"].make, dtype)
    folded, report = bn.fold(model, drawn(*IMAGE, dtype=dtype))
    assert len(report.changes) == 6
    assert {p.dtype for p in folded.parameters()} == {dtype}
    assert 0 < report.certificate.relative <= tolerance == report.certificate.tolerance


def test_weights_that_would_not_fit():
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()), torch.float32)
    model[1].running_var.fill_(0.0)
    model[1].eps = 1e-12
    model.half()
    _, report = bn.fold(model, drawn(4, 3, dtype=torch.float16))
    assert "the weights of 0 would not fit in float16" in report.left["1"]


@pytest.mark.parametrize(("name", "value"), [("running_var", -1.0), ("running_mean", float("nan"))])
def test_bad_statistics(name, value):
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()))
    getattr(model[1], name)[0] = value
    with pytest.raises(bn.BatchNormError, match=r"NaN or infinite on the example .*\(the first .* 1, a BatchNorm1d\)"):
        bn.fold(model, drawn(4, 3))
    _, report = bn.fold(model, drawn(4, 3), forward=lambda model, x: model(x)[:, 1:])
    assert "not finite" in report.left["1"]


def test_what_was_frozen_stays_frozen_and_layouts_stay():
    model = made(lambda: ConvBN(4, 4, 3), torch.float32).to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    folded, _ = bn.fold(model, drawn(2, 4, 5, 5, dtype=torch.float32))
    assert not folded[0].weight.requires_grad
    assert not folded[0].bias.requires_grad
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert folded[0].bias.dtype == torch.float32


def test_a_layer_with_an_activation_inside_folds_after_a_conversion():
    class Activated(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.SiLU()

        def forward(self, x):
            return self.act(super().forward(x))

    torch.manual_seed(0)
    model = perturb(nn.Sequential(nn.Conv2d(3, 4, 3), Activated(4))).eval()
    x = torch.randn(2, 3, 6, 6)
    for brick in ("ghost", "sync"):
        converted, _ = bn.convert(model, brick, example=x)
        folded, report = bn.fold(converted, x)
        assert torch.allclose(folded(x), model(x), atol=1e-5)
        assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules()), report


@pytest.mark.parametrize(
    "thing", [nn.BatchNorm2d, {"weight": torch.ones(1)}, torch.ones(1)], ids=["class", "dict", "tensor"]
)
def test_what_is_no_model_is_said_so(thing):
    for verb in (bn.fold, bn.trace):
        with pytest.raises(bn.BatchNormError, match="the model is"):
            verb(thing, torch.randn(2, 3, 6, 6))
