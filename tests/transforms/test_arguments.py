"""What every verb says of arguments that it cannot work with: one sentence, under its own name."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm import conventions
from batchnorm.transforms.gradients import verify_gradients

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
VERBS = {
    "insert": lambda m, **more: bn.insert(m, X, **more),
    "fold": lambda m, **more: bn.fold(m, X, **more),
    "fuse": lambda m, **more: bn.fuse(m, X, **more),
    "accelerate": lambda m, **more: bn.accelerate(m, X, steps=1, seconds=0, **more),
    "drop_bias": lambda m, **more: bn.drop_bias(m, X, **more),
    "convert": lambda m, **more: bn.convert(m, "batch", example=X, **more),
    "calibrate": lambda m, **more: bn.calibrate(m, [X], **more),
    "adapt": lambda m, **more: bn.adapt(m, [X], **more),
    "trace": lambda m, **more: bn.trace(m, X, **more),
    "freeze": bn.freeze,
    "unfreeze": bn.unfreeze,
}
CERTIFIED = ("insert", "fold", "fuse", "accelerate", "drop_bias", "convert")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


@pytest.mark.parametrize("tolerance", [-1e-3, math.nan, "1e-3", True], ids=str)
@pytest.mark.parametrize("verb", CERTIFIED)
def test_a_tolerance_that_is_none(verb, tolerance):
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: tolerance is .*; give a share of the largest output"):
        VERBS[verb](network(), tolerance=tolerance)


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("freeze", "unfreeze")])
def test_a_forward_that_cannot_be_called(verb):
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: forward is 3; give a function of the model and of"):
        VERBS[verb](network(), forward=3)


def test_one_name_to_leave():
    model = network().eval()
    folded, report = bn.fold(model, X, leave="1")
    assert report.left == {"1": "it was to be left"}
    assert type(folded[1]) is nn.BatchNorm2d
    named = nn.Sequential()
    named.add_module("b1", nn.BatchNorm2d(3))
    named.add_module("conv", nn.Conv2d(3, 2, 1))
    assert bn.fold(named.eval(), X, leave="b1")[1].left == {"b1": "it was to be left"}
    with pytest.raises(bn.BatchNormError, match="fold: there is no BN layer 'b2' to leave; use one of b1"):
        bn.fold(named, X, leave="b2")


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("fold", "trace")])
def test_a_scripted_model(verb):
    scripted = torch.jit.script(network())
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: the model is scripted, and cannot be changed; give the mod"):
        VERBS[verb](scripted)
    partly = nn.Sequential(scripted, nn.BatchNorm2d(4), nn.ReLU())
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: 0 is scripted, and a copy of it would not learn; give"):
        VERBS[verb](partly)


@pytest.mark.parametrize("verb", ["calibrate", "convert"])
def test_scripted_parts_of_a_model_that_is_changed_in_place_are_left(verb):
    partly = nn.Sequential(torch.jit.script(network()), nn.BatchNorm2d(4), nn.ReLU())
    given = {"calibrate": ([X, X + 1],), "convert": ("ghost",)}[verb]
    more = {"groups": 2} if verb == "convert" else {}
    changed, report = getattr(bn, verb)(partly, *given, inplace=True, **more)
    report = getattr(report, "report", report)
    assert changed is partly
    assert report.paths == ("1",)
    assert "it is scripted: " in report.left["0.1"]


@pytest.mark.parametrize("verb", ["insert", "fold", "fuse", "accelerate", "drop_bias", "trace"])
def test_a_compiled_model(verb):
    compiled = torch.compile(network(), backend="eager")
    for model, name in ((compiled, "the model"), (nn.Sequential(compiled), "0")):
        with pytest.raises(bn.BatchNormError, match=rf"^{verb}: {name} \(OptimizedModule\) is compiled; give"):
            VERBS[verb](model)


def test_the_statistics_of_a_compiled_model_are_measured_all_the_same():
    expected, _ = bn.calibrate(network(), [X, X * 2])
    found, _ = bn.calibrate(torch.compile(network(), backend="eager"), [X, X * 2])
    torch.testing.assert_close(found._orig_mod[1].running_var, expected[1].running_var)
    frozen, _ = bn.freeze(found)
    torch.testing.assert_close(frozen.train()(X), expected.eval()(X))


@pytest.mark.parametrize("wrong", [-1e-9, math.nan])
def test_moving_variances_that_are_none(wrong):
    mean, var = np.zeros(3), np.array([1.0, wrong, 2.0])
    for source, given in (
        ("from_keras", {"weights": {"moving_mean": mean, "moving_variance": var}}),
        ("from_flax", {"batch_stats": {"mean": mean, "var": var}}),
    ):
        with pytest.raises(bn.BatchNormError, match=f"^{source}: the smallest moving variance is .*; give variances"):
            getattr(conventions, source)(given)


class Wide(nn.BatchNorm1d):
    """The same function, rounded elsewhere."""

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        affine = self.weight.to(wide), self.bias.to(wide)
        return nn.functional.batch_norm(x.to(wide), None, None, *affine, True, 0.0, self.eps).to(x.dtype)


class Narrow(Wide):
    def forward(self, x):
        centred = x - x.mean(0)
        return centred * torch.rsqrt(centred.square().mean(0) + self.eps) * self.weight + self.bias


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_is_zero_but_for_rounding_is_judged_by_float64(seed):
    torch.manual_seed(seed)
    old = nn.Sequential(nn.Linear(8, 8), Wide(8, track_running_stats=False)).bfloat16()
    for name, parameter in old.named_parameters():
        parameter.requires_grad_(name == "0.bias")  # so that there is no other gradient to compare its size with
    new = copy.deepcopy(old)
    new[1].__class__ = Narrow
    ids = torch.randint(0, 9, (64,))
    table = torch.randn(9, 8)

    def run(model, given):
        return model(table.to(model[0].weight)[given])

    certificate = verify_gradients(old, new, ids, verb="test", forward=run)
    assert "in float64" in certificate.what
    assert certificate.relative <= 1e-9
    new[1].eps = 0.5
    with pytest.raises(bn.NotEquivalent):
        verify_gradients(old, new, ids, verb="test", forward=run)


def test_gradients_that_are_nan_are_not_compared():
    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x):
            return torch.relu(self.bn(x)) + (self.fc(x) * 0).norm(dim=0) * self.fc.bias[0]

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert bn.fuse(Rooted(), x)[1].gradients.relative < 1e-4  # torch's norm has the gradient 0 at 0

    class Nan(Rooted):
        def forward(self, x):
            return torch.relu(self.bn(x)) + (self.fc(x) * 0).sqrt()

    with pytest.raises(bn.BatchNormError, match=r"fuse: in training, gradients of fc\.weight are NaN before anything"):
        bn.fuse(Nan(), x)
