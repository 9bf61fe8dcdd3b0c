"""Who reads what, which classes are BN, and the manners of ``fold``: a reason for all that is left."""

import copy
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from fold_cases import Run, assert_folds, assert_left, assert_nothing_known, drawn, made, without_beta
from torch import nn

import batchnorm as bn
from batchnorm.transforms import fold as module_of_fold
from batchnorm.transforms.affine import New
from zoo import IMAGE, ZOO, ConvBN, perturb

# ---- who else reads it


@pytest.mark.parametrize(("forward", "reason"), [
    (lambda m, x: m.bn(y := m.conv(x)) + y, "what conv makes is read by several (bn, add)"),
    (lambda m, x: {"a": (y := m.conv(x)), "b": m.bn(y)}, "the model also returns what it reads"),
    (lambda m, x: m.bn(F.relu(m.conv(x))), "relu (a function) stands before it"),
    (lambda m, x: m.bn(m.conv(x).relu_()), "relu (a function) stands before it"),
    (lambda m, x: m.bn(m.conv(x)) + m.conv(x), "conv is called 2 times, and not always for this layer"),
    (lambda m, x: m.bn(m.conv(x)) + m.bn(x), "it reads the model's input"),
    (lambda m, x: m.bn(m.conv(x)) + F.conv2d(x, m.conv.weight), "the weight of conv is also read by conv2d"),
    (lambda m, x: m.bn(m.conv(x)) * m.bn.running_var[0], "its tensors are also read by getitem"),
    (lambda m, x: m.bn(m.conv.forward(x)), "conv2d (a function) stands before it"),
    (lambda m, x: m.conv(x) if len(x) else m.bn(x), "this example does not reach it"),
    (lambda m, x: m.bn(y := m.conv(x)) * float(y.detach().numpy().max()), "what conv makes is read by several"),
    (lambda m, x: m.bn(torch.ones_like(x)), "ones_like (a function) stands before it"),
    (lambda m, x: m.bn(m.constant) + x, "nothing that was seen feeds it"),
])  # fmt: skip
def test_who_reads_and_makes_what(forward, reason):
    model = made(lambda: Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3), other=nn.BatchNorm2d(3)))
    model.constant = drawn(2, 3, 5, 5)
    assert_left(model, drawn(2, 3, 5, 5), "bn", reason)


def test_a_view_written_to_counts_as_reading():
    def forward(m, x):
        y = m.conv(x)
        y[:, 0].zero_()
        return m.bn(y)

    assert_left(made(lambda: Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))), drawn(2, 3, 5, 5), "bn",
                "stands before it")  # fmt: skip


def test_a_shared_layer_with_its_shared_norm():
    shared = lambda: Run(lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv(x * 2)), conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))  # noqa: E731, E501  # fmt: skip
    assert_folds(made(shared), drawn(2, 3, 5, 5))


def test_one_norm_for_several_layers():
    make = lambda: Run(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4))  # noqa: E731, E501  # fmt: skip
    _, report = assert_folds(made(make), drawn(2, 3, 5, 5))
    assert str(report.changes[0]).endswith("into a (before it), b (before it)")


def test_modules_under_two_paths():
    def make():
        pair = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return nn.Sequential(pair, nn.ReLU(), pair)

    folded, _ = assert_folds(made(make), drawn(5, 3))
    assert folded[0] is folded[2]
    assert type(folded[2][1]) is nn.Identity


def test_a_norm_under_two_paths_is_replaced_in_both():
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model = Run(
        lambda m, x: m.bn(m.fc(x)), fc=model[0], bn=model[1], table=nn.ModuleDict({"bn": model[1]}), also=model[1]
    )
    folded, _ = bn.fold(model, drawn(5, 3))
    assert folded.table["bn"] is folded.also is folded.bn
    assert type(folded.bn) is nn.Identity


def test_tied_weights():
    def make():
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        b.weight = a.weight
        return nn.Sequential(a, nn.BatchNorm1d(4), nn.ReLU(), b)

    folded, report = assert_folds(made(make), drawn(5, 4))
    assert str(report.changes[0]).endswith("into 0 (before it), with a weight of its own now (160 bytes more)")
    assert folded[0].weight is not folded[3].weight
    _, report = bn.fold(made(make), drawn(5, 4), clone=False)
    assert "0 shares its weight with another layer" in report.left["1"]


def test_tied_weights_after():
    def make():
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        b.weight = a.weight
        return nn.Sequential(a, nn.ReLU(), nn.BatchNorm1d(4), b)

    assert_folds(made(make), drawn(5, 4))
    _, report = bn.fold(made(make), drawn(5, 4), clone=False)
    assert report.left["2"].endswith("3 shares its weight with another layer")


def test_parametrised_weights():
    plain = nn.utils.parametrizations.weight_norm
    model = made(lambda: nn.Sequential(plain(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.ReLU()))
    assert_left(model, drawn(5, 4), "1", "stands before it")


def test_hooks_would_see_other_numbers():
    model = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))
    handle = model[0].register_forward_hook(lambda *a: None)
    assert_left(model, drawn(5, 4), "1", "0 has hooks, which would see other numbers")
    handle.remove()
    model[1].register_forward_pre_hook(lambda *a: None)
    assert_left(model, drawn(5, 4), "1", "it has hooks, which would be lost")


# ---- kinds of layers


class OwnConv(nn.Conv2d):
    """A subclass in name only."""


class SameConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class Standardised(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


def test_subclasses_of_convolutions():
    assert_folds(made(lambda: nn.Sequential(OwnConv(3, 4, 3), nn.BatchNorm2d(4))), drawn(2, 3, 5, 5))
    for kind in (SameConv, Standardised):
        model = made(lambda kind=kind: nn.Sequential(kind(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
        assert_left(model, drawn(2, 3, 5, 5), "1", "stands before it")


class BatchNormAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class Grandchild(BatchNormAct):
    pass


class WithChildren(nn.BatchNorm2d):
    """As timm writes it: what follows are modules of its own."""

    def __init__(self, channels, twice=False):
        super().__init__(channels)
        self.drop, self.act, self.twice = nn.Identity(), nn.SiLU(inplace=True), twice

    def forward(self, x):
        x = self.act(self.drop(super().forward(x)))
        return self.act(x) if self.twice else x


class OwnNorm(nn.BatchNorm2d):
    """A subclass in name only."""


@pytest.mark.parametrize("kind", [BatchNormAct, Grandchild])
def test_subclasses_with_a_forward_of_their_own(kind):
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), kind(4)))
    assert_nothing_known(model, drawn(2, 3, 5, 5), "1", f"its class {kind.__name__} has a forward of its own")
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), kind(4), nn.BatchNorm2d(4)))
    assert_nothing_known(model, drawn(2, 3, 5, 5), "1", f"its class {kind.__name__} has a forward of its own")
    model = made(lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), kind(4), nn.BatchNorm2d(4)))
    assert_left(model, drawn(2, 3, 5, 5), "3", f"2 ({kind.__name__}) stands before it")
    assert_left(model, drawn(2, 3, 5, 5), "2", f"its class {kind.__name__} has a forward of its own")


def test_subclasses_that_finish_with_their_submodules():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), WithChildren(4), nn.Conv2d(4, 2, 1)))
    folded, _ = assert_folds(model, drawn(2, 3, 5, 5))
    assert isinstance(folded[1].act, nn.SiLU)
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), WithChildren(4, twice=True)))
    assert_nothing_known(model, drawn(2, 3, 5, 5), "1", "has a forward of its own")
    model = made(lambda: nn.Sequential(WithChildren(3), nn.BatchNorm2d(3), nn.ReLU()))
    assert_left(model, drawn(2, 3, 5, 5), "1", "0 (WithChildren) stands before it")
    assert_left(model, drawn(2, 3, 5, 5), "0", "it has an activation or a residual of its own")


def test_submodules_that_do_nothing_are_no_activation():
    def make():
        norm = WithChildren(3)
        norm.act = nn.Identity()
        return nn.Sequential(norm, nn.Conv2d(3, 4, 1))

    folded, _ = assert_folds(made(make), drawn(2, 3, 5, 5))
    assert type(folded[0]) is nn.Identity


def test_a_patched_layer():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model[1].forward = lambda x: x
    assert_nothing_known(model, drawn(2, 3, 5, 5), "1", "has a forward of its own")
    del model[1].forward
    weight = model[0].weight.detach().clone()
    model[0].forward = lambda x: F.conv2d(x, weight)
    assert_left(model, drawn(2, 3, 5, 5), "1", "0 (Conv2d) stands before it")


@pytest.mark.parametrize("norm", [
    OwnNorm, bn.BatchNorm2d, nn.SyncBatchNorm, bn.SyncBatchNorm, bn.FrozenBatchNorm, bn.BatchRenorm,
    bn.GhostBatchNorm, bn.SplitBatchNorm, lambda c: bn.BatchNorm2d(c, affine=False),
    lambda c: without_beta(nn.BatchNorm2d(c)), lambda c: nn.BatchNorm2d(c, momentum=None),
    lambda c: bn.BatchNorm2d(c, statistics="running", update=False),
])  # fmt: skip
def test_all_that_is_batch_norm_in_evaluation(norm):
    assert_folds(made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), norm(4))), drawn(2, 3, 5, 5))
    folded, _ = assert_folds(made(lambda: nn.Sequential(norm(3), nn.Dropout(), bn.FrozenBatchNorm(3), nn.ReLU())),
                             drawn(2, 3, 5, 5), ["0"])  # fmt: skip
    assert type(folded[2]) is nn.Identity


class FrozenBatchNorm2d(nn.Module):
    """As the detection libraries write it: not a BatchNorm, four buffers."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.5), ("bias", 0.5), ("running_mean", 0.3), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        w, b, m, v = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var))
        scale = w * (v + self.eps).rsqrt()
        return x * scale + (b - m * scale)


def test_frozen_layers_of_detection_models():
    assert_folds(made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4))), drawn(2, 3, 5, 5))


class OtherFrozenBatchNorm2d(FrozenBatchNorm2d):
    """As one model of transformers has it: eps is in the code. Another's is not the usual one."""

    def __init__(self, channels, eps=1e-5):
        super().__init__(channels, eps)
        self.__dict__["_its"] = self.__dict__.pop("eps")

    def __getattr__(self, name):
        if name == "eps":
            raise AttributeError(name)
        return super().__getattr__(name)

    def forward(self, x):
        scale = self.weight * (self.running_var + self._its).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


def test_frozen_layers_without_an_eps():
    assert_folds(made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), OtherFrozenBatchNorm2d(4))), drawn(2, 3, 5, 5))
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), OtherFrozenBatchNorm2d(4, eps=0.1)))
    assert_nothing_known(model, drawn(2, 3, 5, 5), "1", "its class OtherFrozenBatchNorm2d has a forward of its own")


def test_a_model_that_bn_froze():
    model, _ = bn.freeze(made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))
    assert_folds(model.eval(), drawn(2, 3, 5, 5))


@pytest.mark.parametrize(("norm", "reason"), [
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), "no running statistics"),
    (lambda: bn.BatchNorm2d(4, statistics="batch"), "set to use the batch's statistics"),
    (lambda: bn.BatchNorm2d(4, update=True), "set to update its statistics"),
])  # fmt: skip
def test_layers_that_are_not_a_fixed_scale(norm, reason):
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), norm()))
    _, report = bn.fold(model, drawn(2, 3, 5, 5))
    assert reason in report.left["1"]


def test_domains_are_left():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), bn.DomainBatchNorm(4, domains=("a", "b"))))
    model[1].domain = "a"
    _, report = assert_left(model, drawn(2, 3, 5, 5), "1.domain_a", "one domain of several")
    assert "domain" in report.left["1.domain_b"]


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "silu"])
@pytest.mark.parametrize("kind", [bn.BatchNorm2d, bn.FrozenBatchNorm])
def test_what_was_fused_stays(activation, kind):
    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, activation=activation, negative_slope=0.2))  # noqa: E731
    folded, _ = assert_folds(made(make), drawn(2, 3, 5, 5))
    assert folded[1].activation == activation
    copied = copy.deepcopy(folded)
    assert torch.equal(copied(drawn(2, 3, 5, 5)), folded(drawn(2, 3, 5, 5)))


@pytest.mark.parametrize("call", [
    lambda b, y, r: b(y, r), lambda b, y, r: b(y, residual=r), lambda b, y, r: b(residual=r, input=y),
])  # fmt: skip
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_residual_stays(call, activation):
    model = made(lambda: Run(lambda m, x: call(m.bn, m.conv(x), x), conv=nn.Conv2d(3, 3, 1),
                             bn=bn.BatchNorm2d(3, activation=activation)))  # fmt: skip
    assert_folds(model, drawn(2, 3, 5, 5))


def test_a_layer_that_is_its_own_residual():
    model = made(lambda: Run(lambda m, x: m.bn(y := m.conv(x), y), conv=nn.Conv2d(3, 3, 1), bn=bn.BatchNorm2d(3)))
    assert_left(model, drawn(2, 3, 5, 5), "bn", "what it reads is its residual, too")


def test_a_fused_layer_does_not_go_forward_and_takes_nothing_up():
    model = made(lambda: nn.Sequential(bn.BatchNorm1d(3, activation="relu"), nn.Linear(3, 2)))
    assert_left(model, drawn(5, 3), "0", "it has an activation or a residual of its own")
    model = made(lambda: nn.Sequential(bn.BatchNorm1d(3, activation="relu"), nn.BatchNorm1d(3), nn.ReLU()))
    assert_left(model, drawn(5, 3), "1", "0 (BatchNorm1d) stands before it")
    model = made(
        lambda: nn.Sequential(nn.Linear(3, 3), bn.BatchNorm1d(3, activation="relu"), nn.BatchNorm1d(3), nn.ReLU())
    )
    assert_left(model, drawn(5, 3), "2", "the activation or residual of 1 stands before it")


def test_a_mask_keeps_a_layer():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    model = made(lambda: Run(lambda m, x: m.bn(m.conv(x), mask=mask), conv=nn.Conv1d(3, 3, 1), bn=bn.BatchNorm1d(3)))
    assert_left(model, drawn(2, 3, 3), "bn", "called with a mask")


def test_scripted_layers_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))
        _, report = bn.fold(nn.Sequential(scripted), drawn(2, 3, 5, 5))
    assert report.left == {"0.1": "it is scripted: fold the model before torch.jit.script"}


# ---- manners


def snapshot(model):
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [(type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    )


def assert_same(a, b):
    assert a[1] == b[1]
    assert all(torch.equal(a[0][k], b[0][k]) for k in a[0])


@pytest.mark.parametrize("fails", [False, True])
def test_the_argument_is_untouched(fails):
    def forward(m, x):
        x.mul_(2)
        y = m.bn(m.conv(x))
        if fails:
            raise KeyError("from the model")
        return y

    model = made(lambda: Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))).train()
    x = drawn(2, 3, 5, 5)
    before, given, state = snapshot(model), x.clone(), torch.get_rng_state()
    if fails:
        with pytest.raises(KeyError, match="from the model"):
            bn.fold(model, x)
    else:
        folded, _ = bn.fold(model, x)
        assert not any(m.training for m in folded.modules())
        assert not any(m._forward_hooks for m in folded.modules())
    assert_same(snapshot(model), before)
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_wrong_fold_is_caught_and_named(monkeypatch):
    model = made(lambda: nn.Sequential(ConvBN(3, 4, 3), ConvBN(4, 4, 3), nn.Conv2d(4, 2, 1)))
    before = snapshot(model)
    right = module_of_fold.scaled_outputs

    def wrong(layer, name, affine):
        new = right(layer, name, affine)
        return New(layer, name, new.weight, new.bias * 1.01) if name == "1.0" else new

    monkeypatch.setattr(module_of_fold, "scaled_outputs", wrong)
    with pytest.raises(
        bn.NotEquivalent, match=r"fold: the outputs would differ by .*; they part at 1\.1; the model was"
    ):
        bn.fold(model, drawn(*IMAGE))
    assert_same(snapshot(model), before)
    _, report = bn.fold(model, drawn(*IMAGE), tolerance=0.5)
    assert 1e-10 < report.certificate.relative < 0.5


def test_a_model_that_needs_its_norm():
    model = made(lambda: Run(lambda m, x: m.bn(m.conv(x)) * m.bn.num_features, conv=nn.Conv2d(3, 3, 1),
                             bn=nn.BatchNorm2d(3)))  # fmt: skip
    x = drawn(2, 3, 5, 5)
    with pytest.raises(bn.NotEquivalent, match="the changed model raises AttributeError"):
        bn.fold(model, x)
    _, report = bn.fold(model, x, leave=["bn"])
    assert report.left == {"bn": "it was to be left"}
    with pytest.raises(bn.BatchNormError, match="there is no BN layer 'conv' to leave; use one of bn"):
        bn.fold(model, x, leave=["conv"])


def test_nothing_to_fold():
    with pytest.raises(bn.BatchNormError, match="no BN layer to fold"):
        bn.fold(nn.Linear(3, 3).double(), drawn(2, 3))


def test_a_model_that_cannot_be_copied():
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model.stream = (i for i in range(3))
    with pytest.raises(bn.BatchNormError, match="the model cannot be copied"):
        bn.fold(model, drawn(2, 3))


def test_a_layer_alone_is_left():
    assert_left(perturb(nn.BatchNorm1d(3)).double(), drawn(4, 3), "", "it reads the model's input")


def test_the_report():
    _, report = bn.fold(made(ZOO["pre-activation"].make), drawn(*IMAGE))
    text = str(report)
    assert "0.1.bn2: folded BatchNorm2d -> into 0.1.conv1 (before it)" in text
    assert "2 left alone" in text
    assert "outputs differ by at most" in text
    data = json.loads(report.to_json())
    assert data["certificate"]["inputs"] == 3
    assert set(data["left"]) == {"0.1.bn1", "0.2.bn1"}


def test_other_ways_to_call():
    model = made(lambda: Run(lambda m, x, *, scale: m.bn(m.fc(x)) * scale, fc=nn.Linear(3, 4), bn=nn.BatchNorm1d(4)))
    x = drawn(5, 3)
    for example, forward in (
        ({"x": x, "scale": 2.0}, None),
        ([x], lambda m, batch: m(batch[0], scale=3)),
    ):
        folded, report = bn.fold(model, example, forward=forward)
        assert len(report.changes) == 1
        torch.testing.assert_close(folded(x, scale=1.0), model(x, scale=1.0))
