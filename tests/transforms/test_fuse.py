"""fuse: what is fused into what, that training goes on as before, and what is left alone with which reason."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.errors import NotEquivalent
from batchnorm.transforms.gradients import apart, step, verify_gradients
from batchnorm.transforms.rewrite import Wanted, rewrite


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def conv_bn(channels=16):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))


class Residual(nn.Module):
    """As torchvision writes it: one activation module for two places, a sum in place."""

    def __init__(self, downsample=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv_bn() if downsample else None

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity
        return self.relu(out)


class Functional(nn.Module):
    """One BN layer, and whatever is done with what it makes."""

    def __init__(self, do):
        super().__init__()
        self.conv, self.bn, self.do = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), do

    def forward(self, x):
        return self.do(self.bn(self.conv(x)), x)


class Nested(nn.Module):
    """A BN layer that ends a Sequential, and the sum outside of it."""

    def __init__(self):
        super().__init__()
        self.conv = conv_bn()

    def forward(self, x):
        return x + self.conv(x)


class Dropping(nn.Module):
    """Code that does something else in training."""

    def __init__(self):
        super().__init__()
        self.bn, self.p = nn.BatchNorm2d(16), 0.5

    def forward(self, x):
        return F.dropout(F.relu(self.bn(x)), self.p, self.training)


class Branching(nn.Module):
    """Control flow on values, which torch.fx refuses."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(self.bn(x)) if x.sum() > -1e9 else x


def perturbed(model):
    """Statistics and parameters as after some training: never 0 and 1."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (module.weight, 0.5, 1.5), (module.bias, -1, 1),
                (module.running_mean, -1, 1), (module.running_var, 0.5, 2),
            ):  # fmt: skip
                if tensor is not None:
                    nn.init.uniform_(tensor, low, high)
    return model


def images(dtype=torch.float64):
    return torch.randn(4, 16, 6, 6, dtype=dtype)


def assert_same(old, new, x, rtol):
    assert list(old.state_dict()) == list(new.state_dict())
    for training in (True, False):
        a, b = (step(m.train(training), x) for m in (copy.deepcopy(old), copy.deepcopy(new)))
        assert len(a.kinds["gradients"]) > 1
        worst = {name: relative for name, (_, relative, _) in apart(a, b).items() if relative > rtol}
        assert not worst


MODELS = {
    "modules": lambda: nn.Sequential(conv_bn(), nn.ReLU(), *conv_bn(), nn.ReLU6(), *conv_bn(), nn.LeakyReLU(0.2)),
    "residual": Residual,
    "two sums": lambda: nn.Sequential(Residual(True), Residual()),
    "nested": Nested,
    "dropping": Dropping,
    "branching": Branching,
    "F.relu": lambda: Functional(lambda y, x: F.relu(y)),
    "F.relu inplace": lambda: Functional(lambda y, x: F.relu(y, inplace=True)),
    "relu_": lambda: Functional(lambda y, x: y.relu_()),
    "torch.relu of a sum": lambda: Functional(lambda y, x: torch.relu(x + y)),
    "relu6 of torch.add": lambda: Functional(lambda y, x: F.relu6(torch.add(y, x))),
    "leaky": lambda: Functional(lambda y, x: F.leaky_relu(y.add_(x), negative_slope=0.3)),
    "silu": lambda: Functional(lambda y, x: F.silu(y)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_gives_the_same_in_float64(name):
    model, x = perturbed(MODELS[name]()).double(), images()
    before = copy.deepcopy(model.state_dict())
    fused, report = bn.fuse(model, x)
    assert_same(model, fused, x, 1e-9)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert report.certificate.relative <= 1e-10
    assert report.gradients.relative <= 1e-9
    assert report.gradients.what == "gradients"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", ["modules", "two sums", "nested", "leaky"])
def test_a_step_gives_the_same_in_float32(name, layout, path):
    model, x = perturbed(MODELS[name]()), images(torch.float32).contiguous(memory_format=layout)
    fused, report = bn.fuse(model, x)
    assert_same(model, fused, x, 1e-4)
    assert fused(x).is_contiguous(memory_format=layout)
    assert report.certificate.tolerance == 1e-4


def fused_layers(model):
    return {
        name: (layer.activation, layer.negative_slope)
        for name, layer in model.named_modules()
        if isinstance(layer, bn.layers.batch._BatchNormBase)
    }


def test_what_goes_into_which_layer():
    fused, _ = bn.fuse(MODELS["modules"](), images(torch.float32))
    assert fused_layers(fused) == {"0.1": ("relu", 0.01), "3": ("relu6", 0.01), "6": ("leaky_relu", 0.2)}
    assert [type(m) for m in fused][1::3] == [nn.Identity] * 3
    fused, report = bn.fuse(nn.Sequential(Residual(True)), images(torch.float32))
    assert fused_layers(fused) == {
        "0.bn1": ("relu", 0.01), "0.bn2": ("relu", 0.01), "0.downsample.1": (None, 0.01),
    }  # fmt: skip
    assert report.left == {"0.downsample.1": "not fused: the sum is fused into the other layer that it adds"}
    assert "residual = downsample" in type(fused[0])._recipe.sources[0]
    assert "relu" not in type(fused[0])._recipe.sources[0]
    fused, _ = bn.fuse(Nested(), images(torch.float32))
    assert "residual = x" in type(fused)._recipe.sources[1]
    fused, _ = bn.fuse(MODELS["leaky"](), images(torch.float32))
    assert fused_layers(fused) == {"bn": ("leaky_relu", 0.3)}


def test_the_layers_run_once_with_all_that_follows(monkeypatch):
    fused, _ = bn.fuse(nn.Sequential(Residual()), images(torch.float32))
    seen = []
    for layer in (fused[0].bn1, fused[0].bn2):
        layer.register_forward_pre_hook(lambda m, args, kwargs: seen.append(list(kwargs)), with_kwargs=True)
    fused[0].relu.register_forward_hook(lambda *_: seen.append("relu"))
    fused(images(torch.float32))
    assert seen == [[], ["residual"]]


LEFT = {
    "an unknown activation": (lambda: Functional(lambda y, x: F.silu(y)), "silu follows"),
    "several readers": (lambda: Functional(lambda y, x: F.relu(y) + y), "read by several"),
    "returned": (lambda: Functional(lambda y, x: (y, F.relu(y))), "the model returns its output"),
    "broadcast": (lambda: Functional(lambda y, x: F.relu(y + x[:, :, :1])), "another shape"),
    "a constant": (lambda: Functional(lambda y, x: F.relu(y + 1)), "another shape"),
    "scaled": (lambda: Functional(lambda y, x: F.relu(torch.add(y, x, alpha=2))), "not a plain sum"),
    "control flow": (Branching, "torch.fx cannot trace Branching"),
    "into another": (lambda: Functional(lambda y, x: F.relu(x.mul(1).add_(y))), "in place to something"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why_and_is_exchanged_all_the_same(name):
    make, reason = LEFT[name]
    model = make()
    fused, report = bn.fuse(model, images(torch.float32))
    assert reason in report.left["bn"]
    assert type(fused) is type(model)
    assert type(fused.bn) is bn.BatchNorm2d
    assert fused.bn.activation is None


def test_what_changes_in_between_is_not_read_later():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(16)

        def forward(self, x):
            x = x * 2
            y = self.bn(x)
            x.mul_(3)
            return F.relu(y + 1 * x)

    made, fused, left = rewrite(Late(), {"bn": Wanted(residual=True, activation=True)})
    assert made is None
    assert not fused
    assert "used in between" in left["bn"]


def test_an_activation_with_other_callers_stays_and_the_code_is_written_anew():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()
            self.first = nn.Sequential(*conv_bn(), self.relu)
            self.bn = nn.BatchNorm2d(16)

        def forward(self, x):
            return self.relu(self.bn(self.relu(self.first(x) - 1)))

    model, x = perturbed(Shared()).double(), images()
    fused, report = bn.fuse(model, x)
    assert type(fused.first[2]) is nn.Identity  # this slot serves BN only
    assert type(fused.relu) is nn.ReLU  # this one does not
    assert fused_layers(fused) == {"first.1": ("relu", 0.01), "bn": ("relu", 0.01)}
    assert type(fused).__name__ == "FusedShared"
    assert not report.left
    assert_same(model, fused, x, 1e-9)


@pytest.mark.parametrize("which", ["0.bn1", "0.relu"])
def test_hooks_see_what_they_saw(which):
    model = nn.Sequential(Residual())
    model.get_submodule(which).register_forward_hook(lambda *_: None)
    fused, report = bn.fuse(model, images(torch.float32))
    assert "hooks" in report.left["0.bn1"]
    assert fused[0].bn1.activation is None


def test_a_layer_called_twice_with_different_ends_is_left():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(16)

        def forward(self, x):
            return F.relu6(self.bn(F.relu(self.bn(x))))

    model, x = Twice().double(), images()
    fused, report = bn.fuse(model, x)
    assert "different activations" in report.left["bn"]
    assert_same(model, fused, x, 1e-9)


def test_optional_arguments_and_attributes_are_not_fixed_in_silence():
    class Optional(Functional):
        def forward(self, x, scale=None):
            return super().forward(x if scale is None else x * scale)

    _, report = bn.fuse(Optional(lambda y, x: F.relu(y)), images(torch.float32))
    assert "optional argument (scale)" in report.left["bn"]
    fused, _ = bn.fuse(Dropping(), images(torch.float32))
    fused.p = 0.1
    with pytest.raises(bn.BatchNormError, match=r"p is 0.1, but the forward was rewritten for 0.5; set it first"):
        fused(images(torch.float32))


def test_code_that_keeps_something_is_left():
    class Keeping(Functional):
        def forward(self, x):
            self.kept = F.relu(self.bn(x))
            return self.kept

    _, report = bn.fuse(Keeping(None), images(torch.float32))
    assert "keeps something" in report.left["bn"]


def test_modes_classes_pickle_and_copies(tmp_path):
    model = nn.Sequential(Residual(True), Residual(), Residual()).eval()
    model[1].train()
    fused, _ = bn.fuse(model, images(torch.float32))
    assert [m.training for m in fused] == [False, True, False]
    assert isinstance(fused[0], Residual)
    assert type(fused[1]) is type(fused[2]) is not type(fused[0])
    x = images(torch.float32)
    again = pickle.loads(pickle.dumps(fused))
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for other in (copy.deepcopy(fused), again, torch.load(file, weights_only=False)):
        assert type(other[0]) is type(fused[0])
        assert other[0].bn2.weight is not fused[0].bn2.weight
        torch.testing.assert_close(other.eval()(x), copy.deepcopy(fused).eval()(x))
    model.load_state_dict(fused.state_dict())
    assert torch.equal(fused[0](x=x), fused[0](x))
    with pytest.raises(TypeError, match="no argument 'y'"):
        fused[0](x, y=1)


def test_fusing_twice_changes_nothing_more():
    once, _ = bn.fuse(nn.Sequential(Residual(True), *conv_bn(), nn.ReLU()), images(torch.float32))
    twice, report = bn.fuse(once, images(torch.float32))
    assert not report.changes
    assert fused_layers(twice) == fused_layers(once)
    assert_same(once, twice, images(torch.float32), 1e-6)


def test_the_optimisers_follow_and_training_goes_on_the_same():
    model, x = perturbed(nn.Sequential(Residual(), conv_bn())).double(), images()
    stock = copy.deepcopy(model)
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]

    def make(weights, rest):
        groups = [{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "lr": 0.01}]
        return [torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-3)]

    def train(model, optimizers, steps):
        for _ in range(steps):
            for each in optimizers:
                each.zero_grad()
            model(x).square().mean().backward()
            for each in optimizers:
                each.step()

    ours = make(weights, rest)
    theirs = make([p for p in stock.parameters() if p.dim() > 1], [p for p in stock.parameters() if p.dim() == 1])
    train(model, ours, 2)
    train(stock, theirs, 2)
    before = copy.deepcopy(model.state_dict())
    fused, _ = bn.fuse(model, x, optimizer=ours)
    train(fused, ours, 3)
    train(stock, theirs, 3)
    for name, tensor in stock.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], tensor, rtol=1e-8, atol=1e-10)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    with pytest.raises(bn.BatchNormError, match="holds no parameter of this model"):
        bn.fuse(nn.Sequential(conv_bn()), x.float(), optimizer=ours)
    with pytest.raises(bn.BatchNormError, match="optimizer is a str"):
        bn.fuse(nn.Sequential(conv_bn()), x.float(), optimizer=["adam"])


def test_other_dimensions_and_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.three = nn.BatchNorm1d(16), nn.BatchNorm3d(16)

        def forward(self, a, b):
            return {"a": F.relu(self.one(a) + a), "b": torch.relu(self.three(b))}

    model = perturbed(Two()).double()
    x = {"a": torch.randn(8, 16).double(), "b": torch.randn(2, 16, 3, 3, 3).double()}
    fused, report = bn.fuse(model, x)
    assert fused_layers(fused) == {"one": ("relu", 0.01), "three": ("relu", 0.01)}
    assert report.gradients.relative <= 1e-9
    _, report = bn.fuse(model, tuple(x.values()), forward=lambda m, given: m(*given)["a"])
    assert not report.left


def test_no_bn_and_foreign_bn():
    with pytest.raises(bn.BatchNormError, match="no BN layer to fuse"):
        bn.fuse(nn.Linear(2, 2), torch.randn(2, 2))

    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Own(16), nn.ReLU())
    fused, report = bn.fuse(model, images(torch.float32))
    assert type(fused[0]) is bn.BatchNorm2d  # on trial it was batch norm
    assert fused[0].activation == "relu"
    assert not report.left


def test_gradients_that_differ_are_found():
    class Wrong(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.bn, self.factor = nn.BatchNorm2d(16), factor

        def forward(self, x):
            y = self.bn(x)
            return y.detach() * (1 - self.factor) + y * self.factor  # the same output, another gradient

    old, new = Wrong(1.0), Wrong(0.999)
    new.load_state_dict(old.state_dict())
    with pytest.raises(NotEquivalent, match=r"in float64, gradients of bn.weight would differ"):
        verify_gradients(old, new, images(torch.float32), verb="test")
    with pytest.raises(NotEquivalent, match=r"in training, gradients of bn.weight would differ"):
        verify_gradients(old, new, images(torch.float32), verb="test", tolerance=1e-5)
    assert verify_gradients(old, new, images(torch.float32), verb="test", tolerance=0.1).relative > 1e-4
    moved = copy.deepcopy(old.double())
    moved.bn.momentum = 0.2
    with pytest.raises(NotEquivalent, match=r"buffers of bn\.running_mean"):
        verify_gradients(old, moved, images(), verb="test")


def test_what_rounding_does_is_not_held_against_a_model():
    # So deep and so many that a unit in the last place takes values across kinks.
    layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    fused, report = bn.fuse(model, x)
    assert report.gradients.relative <= report.gradients.tolerance
    found = apart(step(model, x), step(fused, x))
    if max(relative for _, relative, _ in found.values()) > 1e-4:
        assert report.gradients.what.startswith("gradients in float64 (in the model's own numbers: ")
        assert report.gradients.tolerance == 1e-9


def test_compiles():
    fused, _ = bn.fuse(Residual(True), images(torch.float32))
    x = images(torch.float32)
    compiled = torch.compile(copy.deepcopy(fused), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fused(x))


class Annotated(nn.Module):
    """As torchvision writes its blocks: annotated, one activation for all, and its input added at the end."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn(self.conv(x)))
        return self.relu(self.bn2(self.conv2(out)) + x) if hasattr(self, "bn2") else out


class LaterResidual(nn.Module):
    """What one fused layer makes is what another one adds."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + h)


@pytest.mark.parametrize("model", [Annotated, LaterResidual])
def test_annotated_code_and_later_residuals(model):
    torch.manual_seed(0)
    net = model().train()
    x = torch.randn(4, 3 if model is LaterResidual else 4, 6, 6)
    fused, report = bn.fuse(net, x)
    norms = [m for m in fused.modules() if isinstance(m, bn.BatchNorm2d)]
    assert [norm.activation for norm in norms] == ["relu"] * len(norms)
    assert torch.allclose(fused(x), net(x), atol=1e-5)
    assert report.gradients is not None


def test_the_blocks_of_torchvision():
    from peer_models import subject

    model, x = subject("vision", "resnet18")
    fused, report = bn.fuse(model, x[:, :, :64, :64].repeat(2, 1, 1, 1))
    assert sum(isinstance(m, bn.BatchNorm2d) and m.activation == "relu" for m in fused.modules()) == 17
    assert report.certificate.relative < 1e-4
