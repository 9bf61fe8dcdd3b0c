"""``freeze`` over norms of other libraries and of users: what keeps statistics of batches is frozen, or it raises."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.layers.foreign import statistics_of
from batchnorm.transforms.freeze import is_frozen
from peer_models import torchvision


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class NormAct(nn.BatchNorm2d):
    """As timm writes it: the forward of its own, with dropout and activation."""

    def __init__(self, channels, drop=0.0, act=None):
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(drop), act or nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        held = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if held else (None, None)
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training or mean is None, 0.1, self.eps)
        return self.act(self.drop(x))


class Graded(nn.Module):
    """As d2l.ai writes it: whether gradients are on decides, not the mode."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.moving_mean, self.moving_var = torch.zeros(1, channels, 1, 1), torch.ones(1, channels, 1, 1)

    def forward(self, x):
        mean, var = self.moving_mean, self.moving_var
        if torch.is_grad_enabled():
            mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
            self.moving_mean = (0.9 * self.moving_mean + 0.1 * mean).data
            self.moving_var = (0.9 * self.moving_var + 0.1 * var).data
        return self.gamma * (x - mean) / (var + 1e-5).sqrt()


class EmaNorm(nn.Module):
    """Statistics of which neither a name nor a call of ``batch_norm`` shows what they are."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("center", torch.zeros(channels))

    def forward(self, x):
        if self.training:
            self.center.lerp_(x.mean([0, *range(2, x.dim())]), 0.1)
        return x - self.center.view(1, -1, *[1] * (x.dim() - 2))


class Doubled(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


class Ours(bn.BatchNorm2d):
    """A subclass of ours that does not listen to the switches."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Named(nn.BatchNorm2d):
    """A class of its own that computes what torch's does."""


class Moving(nn.Module):
    """A norm that is no subclass of torch's, keeps what TensorFlow keeps, and learns a third vector."""

    def __init__(self, channels):
        super().__init__()
        self.gain, self.weight, self.bias = (nn.Parameter(torch.ones(channels)) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(channels))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_variance", torch.ones(channels))

    def forward(self, x):
        x = torch.einsum("nchw,dc->ndhw", x, self.mix)
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            self.moving_mean = 0.9 * self.moving_mean + 0.1 * mean.detach()
            self.moving_variance = 0.9 * self.moving_variance + 0.1 * var.detach()
        else:
            mean, var = self.moving_mean, self.moving_variance
        mean, var, gamma, beta = (t[:, None, None] for t in (mean, var, self.weight * self.gain, self.bias))
        return (x - mean) * torch.rsqrt(var + 1e-5) * gamma + beta


class Plain(nn.Module):
    """As textbooks write it: statistics that are plain attributes, of the shape of what they are subtracted from."""

    def __init__(self, channels):
        super().__init__()
        self.gamma, self.beta = (
            nn.Parameter(t) for t in (torch.ones(1, channels, 1, 1), torch.zeros(1, channels, 1, 1))
        )
        self.moving_mean, self.moving_var = torch.zeros(1, channels, 1, 1), torch.ones(1, channels, 1, 1)

    def forward(self, x):
        mean, var = self.moving_mean, self.moving_var
        if self.training:
            mean = x.mean((0, 2, 3), keepdim=True)
            var = (x - mean).square().mean((0, 2, 3), keepdim=True)
            self.moving_mean = (0.9 * self.moving_mean + 0.1 * mean).detach()
            self.moving_var = (0.9 * self.moving_var + 0.1 * var).detach()
        return self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta


class AsParameters(nn.Module):
    """Statistics that are parameters which do not learn."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.running_var = nn.Parameter(torch.ones(channels), requires_grad=False)

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class OtherNames(nn.Module):
    """Statistics of no known name, which the forward gives to torch's function."""

    def __init__(self, channels):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mu", torch.zeros(channels))
        self.register_buffer("sigma2", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.mu, self.sigma2, self.g, self.b, self.training)


class Conditional(nn.BatchNorm2d):
    """Called with a second argument, which a trial does not know."""

    def forward(self, x, scale):
        return super().forward(x) * scale


class Stubborn(nn.BatchNorm2d):
    """Updates in evaluation, too."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


class StubbornPair(nn.BatchNorm2d):
    def forward(self, x, other):
        return F.batch_norm(x + other, self.running_mean, self.running_var, self.weight, self.bias, True)


def parametrised(kind):
    return nn.utils.parametrizations.weight_norm(kind(4), dim=None)


def synchronised(layer):
    return bn.convert(layer, "sync")[0]


def timms(name, **options):
    torchvision()
    layers = pytest.importorskip("timm.layers")
    return getattr(layers, name)(4, **options)


LAYERS = {
    "norm and activation": lambda: NormAct(4),
    "doubled": lambda: Doubled(4),
    "a subclass of ours": lambda: Ours(4),
    "a class without a forward": lambda: Named(4),
    "not torch's": lambda: Moving(4),
    "plain attributes": lambda: Plain(4),
    "statistics as parameters": lambda: AsParameters(4),
    "names of its own": lambda: OtherNames(4),
    "instance norm that keeps statistics": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "parametrised torch": lambda: parametrised(nn.BatchNorm2d),
    "parametrised ours": lambda: parametrised(bn.BatchNorm2d),
    "synchronised by convert": lambda: synchronised(NormAct(4)),
    "torch's, synchronised": lambda: nn.SyncBatchNorm(4),
    "timm BatchNormAct2d": lambda: timms("BatchNormAct2d"),
    "timm BatchNormAct2d, synchronised": lambda: synchronised(timms("BatchNormAct2d", act_layer=nn.SiLU)),
    "timm SyncBatchNormAct": lambda: timms("SyncBatchNormAct"),
    "timm EvoNorm2dB0": lambda: timms("EvoNorm2dB0"),
    "timm EvoNorm2dB1": lambda: timms("EvoNorm2dB1"),
    "timm SplitBatchNorm2d": lambda: timms("SplitBatchNorm2d"),
}


def images(layer, count=6):
    return torch.randn(count, 4, *([5] if isinstance(layer, Doubled) else [5, 5])) * 2 + 1


@pytest.mark.parametrize("name", LAYERS)
def test_every_norm_that_keeps_statistics_is_frozen_and_thawed(name):
    layer = LAYERS[name]()
    for _ in range(2):
        layer(images(layer))
    kind, learned = type(layer), {n: p.requires_grad for n, p in layer.named_parameters()}
    assert statistics_of(layer)
    frozen, report = bn.freeze(layer)
    assert report.paths[:1] == ("",)
    assert isinstance(frozen, kind) or kind is nn.SyncBatchNorm
    assert list(frozen.state_dict()) == list(layer.state_dict())
    expected = copy.deepcopy(layer).eval()
    copies = [frozen, copy.deepcopy(frozen)]
    if "parametrised" not in name:  # which torch does not pickle
        copies.append(pickle.loads(pickle.dumps(frozen)))
    for each in copies:
        before = {n: t.clone() for n, t in (each.state_dict() | statistics_of(each)).items()}
        for mode in (True, False, True):
            x = images(layer)
            torch.testing.assert_close(each.train(mode)(x.clone()), expected(x.clone()), rtol=1e-5, atol=1e-5)
            assert each.training is mode
        for n, t in (each.state_dict() | statistics_of(each)).items():
            # torch 2.7 writes the mean of copies of an instance norm's statistics into them, in evaluation too.
            torch.testing.assert_close(t, before[n], rtol=1e-6 if "instance" in name else 0, atol=0, msg=n)
        assert is_frozen(each)
        assert not any(p.requires_grad for n, p in each.named_parameters() if n != "mix")
        assert bn.freeze(each)[1].left.get("") == "frozen already"
        thawed, _ = bn.unfreeze(each)
        assert type(thawed) is kind
        assert {n: p.requires_grad for n, p in thawed.named_parameters()} == learned
        assert vars(thawed).keys() == vars(layer).keys()
        old = [t.clone() for t in statistics_of(thawed).values()]
        thawed.train()(images(layer))
        assert not all(map(torch.equal, old, statistics_of(thawed).values()))


@pytest.mark.parametrize("kind", [Plain, AsParameters, OtherNames, Moving])
def test_statistics_of_any_home_are_held(kind):
    model = nn.Sequential(kind(4))
    for hold in (bn.no_update, bn.use_batch_statistics):
        before = statistics_of(model[0])
        assert len(before) == 2
        with hold(model.train(hold is bn.no_update)):
            model(images(None))
        after = statistics_of(model[0])
        assert all(after[n] is t and torch.equal(after[n], t) for n, t in before.items())
    model.train()
    once, twice = bn.update_once(copy.deepcopy(model)), copy.deepcopy(model)
    x = images(None)
    for each in (once, twice):
        torch.utils.checkpoint.checkpoint(each, x, use_reentrant=False).sum().backward()
    model(x)
    held, moved, wanted = (statistics_of(each[0]) for each in (once, twice, model))
    assert all(torch.equal(held[n], t) for n, t in wanted.items())
    assert not any(torch.equal(moved[n], t) for n, t in wanted.items())


def test_a_function_without_statistics_keeps_none():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = F.batch_norm(self.weight.view(1, len(self.weight), -1), None, None, training=True)
            return F.conv2d(x, weight.view_as(self.weight), self.bias)

    layer = Standardised(4, 4, 3)
    assert not statistics_of(layer)
    assert not bn.freeze(layer)[1].changes


def test_dropout_inside_goes_on_and_learned_activations_learn():
    layer = NormAct(4, drop=0.5, act=nn.PReLU())
    frozen, _ = bn.freeze(nn.Sequential(layer))
    x = images(layer)
    share = (frozen.train()(x) == 0).float().mean()
    assert 0.4 < share < 0.6
    assert not (frozen.eval()(x) == 0).any()
    assert frozen[0].act.weight.requires_grad
    assert not frozen[0].weight.requires_grad


def test_a_layer_that_a_trial_cannot_call_is_frozen_and_checked_at_every_call():
    model = nn.ModuleDict({"fine": Conditional(4), "not": StubbornPair(4)})
    frozen, _ = bn.freeze(model)
    x = images(None)
    expected = copy.deepcopy(model["fine"]).eval()(x, 3.0)
    assert torch.equal(frozen.train()["fine"](x, 3.0), expected)
    assert int(frozen["fine"].num_batches_tracked) == 0
    with pytest.raises(bn.BatchNormError, match="StubbornPair: its statistics moved though it is frozen"):
        frozen["not"](x, x)


def test_what_cannot_be_frozen_is_named_and_nothing_has_changed():
    patched = nn.BatchNorm2d(4)
    patched.forward = lambda x: x
    lazy = nn.LazyBatchNorm2d()
    for stuck, why in (
        (Stubborn(4), "Stubborn: its statistics move in evaluation, too"),
        (Graded(4), "Graded: its statistics move in evaluation, too"),
        (EmaNorm(4), "EmaNorm: a batch moves its center, which no name shows"),
        (patched, "BatchNorm2d: its forward was replaced on the object"),
        (lazy, "LazyBatchNorm2d: not initialised yet: run the model once"),
    ):
        model = nn.ModuleDict({"good": nn.BatchNorm2d(4), "stuck": stuck})
        optimizer = torch.optim.SGD(model["good"].parameters(), lr=0.1)
        for inplace in (True, False) if stuck is not patched and stuck is not lazy else (True,):
            with pytest.raises(bn.BatchNormError, match=rf"freeze: 1 layer .* \(stuck: {why}"):
                bn.freeze(model, inplace=inplace, optimizer=optimizer)
            assert type(model["good"]) is nn.BatchNorm2d
            assert model["good"].weight.requires_grad
            assert optimizer.param_groups[0]["params"][0] is model["good"].weight
        assert bn.freeze(model, "good", inplace=True)[1].paths == ("good",)


def test_scripted_layers_are_named():
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4)))
    model = nn.Sequential(nn.BatchNorm2d(4), scripted)
    with pytest.raises(bn.BatchNormError, match=r"1\.0: it is scripted: freeze it before torch\.jit\.script"):
        bn.freeze(model, inplace=True)
    assert bn.freeze(model, "0", inplace=True)[1].paths == ("0",)


def test_classes_that_were_built_frozen():
    vision = torchvision()
    built = vision.ops.FrozenBatchNorm2d(4)
    frozen, report = bn.freeze(nn.Sequential(built, nn.BatchNorm2d(4)))
    assert report.left == {"0": "frozen already"}
    assert type(frozen[0]) is type(built)
    with pytest.raises(bn.BatchNormError, match="0: a FrozenBatchNorm2d was built with constants"):
        bn.unfreeze(nn.Sequential(built))
    assert "built with constants" in bn.unfreeze(frozen)[1].left["0"]


# Norms and activations in one class, batch norm in attention, squeeze and excitation, parts called in loops.
MODELS = (
    "mobilenetv3_small_050",
    "densenet121",
    "levit_128s",
    "selecsls42",
    "hardcorenas_a",
    "ghostnet_100",
    "test_byobnet",
)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_moves_in_a_model_of_timm(name):
    torchvision()
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False, drop_rate=0.0)
    size = (2, 3, *([224, 224] if name.startswith("levit") else [64, 64]))
    frozen, _ = bn.freeze(model)
    expected = model.eval()
    before = {n: b.clone() for n, b in frozen.named_buffers()}
    for m in frozen.train().modules():  # what is random in training is another subject
        if isinstance(m, nn.Dropout) or type(m).__name__ == "DropPath":
            m.eval()
    for _ in range(2):
        x = torch.randn(size)
        out = frozen(x)
        out = torch.stack(out).mean(0) if isinstance(out, (tuple, list)) else out
        torch.testing.assert_close(out, expected(x), rtol=1e-4, atol=1e-4)
    assert before
    for n, b in frozen.named_buffers():
        assert torch.equal(b, before[n]), n


def test_compiled_and_exported():
    frozen, _ = bn.freeze(nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4)))
    x = torch.randn(2, 3, 8, 8)
    expected = frozen.train()(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(frozen, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.export.export(frozen, (x,)).module()(x), expected)
    torch._dynamo.reset()
    assert int(frozen[1].num_batches_tracked) == 0


def test_other_verbs_know_a_layer_that_is_frozen_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    frozen, _ = bn.freeze(model, "1")
    x = torch.randn(8, 3, 8, 8)
    _, calibrated = bn.calibrate(frozen, [x])
    assert calibrated.report.left == {"1": "it is frozen"}
    assert "frozen" in bn.convert(frozen, "group", example=x)[1].left["1"]
    folded, report = bn.fold(frozen, x)
    assert "1" in report.paths
    torch.testing.assert_close(folded(x), frozen.eval()(x), rtol=1e-4, atol=1e-4)
    with bn.use_batch_statistics(frozen.eval()):
        y = frozen[:2](x)
    torch.testing.assert_close(y, copy.deepcopy(model).train()[:2](x))
    assert int(frozen[1].num_batches_tracked) == 0
    assert not list(bn.check(frozen.train(), x, select=["BN105"]))
