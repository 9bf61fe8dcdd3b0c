"""Every verb on norms of other libraries: it works, or the report says why not, or it raises if it did nothing."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from peer_models import torchvision


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class NormAct(nn.BatchNorm2d):
    """Batch norm, then a dropout and an activation, in a forward of its own."""

    def __init__(self, channels, act=None, drop=0.0):
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(drop), act or nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        held = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if held else (None, None)
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training or mean is None, 0.1, self.eps)
        return self.act(self.drop(x))


class Doubled(nn.BatchNorm2d):
    """What no verb can know."""

    def forward(self, x):
        return super().forward(x) * 2


class Silent(nn.Module):
    """Keeps statistics and is no subclass of torch's, nor called a norm."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight.flatten(), None, self.training)


def timm_norm(channels, **options):
    torchvision()
    return pytest.importorskip("timm.layers").BatchNormAct2d(channels, **options)


def network(norm, bias=True):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=bias), norm(6), nn.Conv2d(6, 4, 3, bias=bias), norm(4), nn.Flatten(), nn.Linear(64, 2)
    ).double()
    for _ in range(2):
        model(batch())
    return model


def batch():
    return torch.randn(8, 3, 8, 8, dtype=torch.float64) * 2 + 1


BATCHES = torch.randn(32, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).split(8)
KNOWN = {
    "own class": NormAct,
    "timm": timm_norm,
    "leaky": lambda c: NormAct(c, nn.LeakyReLU(0.2)),
    "silu": lambda c: NormAct(c, nn.SiLU()),
    "dropout": lambda c: NormAct(c, drop=0.5),
}


@pytest.mark.parametrize("norm", KNOWN)
def test_fuse(norm):
    model = network(KNOWN[norm])
    fused, report = bn.fuse(model, batch())
    assert set(report.paths) == {"1", "3"}
    assert all(isinstance(fused[i], bn.BatchNorm2d) for i in (1, 3))
    inside = {"own class": "relu", "timm": "relu", "leaky": "leaky_relu"}.get(norm)
    assert fused[1].activation == inside
    assert (type(fused[1]) is bn.BatchNorm2d) == (inside is not None)
    assert list(fused.state_dict()) == list(model.state_dict())
    x = batch()
    for again in (fused, pickle.loads(pickle.dumps(fused))):
        for training in (False, True) if norm != "dropout" else (False,):
            one, other = copy.deepcopy(model).train(training), copy.deepcopy(again).train(training)
            torch.testing.assert_close(other(x.clone()), one(x.clone()), rtol=1e-10, atol=1e-10)
            for a, b in zip(one.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert "_before_convert" not in vars(fused[1])  # without its activation it is not what it was


@pytest.mark.parametrize("norm", KNOWN)
def test_drop_bias(norm):
    model = network(KNOWN[norm])
    lean, report = bn.drop_bias(model, batch())
    assert lean[0].bias is None
    assert lean[2].bias is None
    assert report.certificate is not None
    x = batch()
    torch.testing.assert_close(lean.eval()(x.clone()), model.eval()(x.clone()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", KNOWN)
@pytest.mark.parametrize("verb", ["calibrate", "adapt"])
@pytest.mark.parametrize("synced", [False, True])
def test_statistics_are_measured_with_those_of_the_batches_in_front(norm, verb, synced):
    """The second layer's are those of a network whose first layer uses the batch, as in training."""
    model = network(KNOWN[norm])
    plain = copy.deepcopy(model)
    if synced:
        model, _ = bn.convert(model, "sync")
    measured, _ = getattr(bn, verb)(model, BATCHES)
    x, means = BATCHES, []
    for part in x:
        first = F.batch_norm(plain[0](part), None, None, plain[1].weight, plain[1].bias, True, 0.0, plain[1].eps)
        means.append(plain[2](plain[1].act(first)).mean((0, 2, 3)))
    torch.testing.assert_close(measured[3].running_mean, torch.stack(means).mean(0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("norm", KNOWN)
def test_convert_and_fold(norm):
    model = network(KNOWN[norm]).eval()
    converted, report = bn.convert(model, "ghost", example=batch())
    assert set(report.paths) == {"1", "3"}
    folded, report = bn.fold(model, batch())
    assert {"1", "3"} <= set(report.paths)
    x = batch()
    for each in (converted.eval(), folded):
        torch.testing.assert_close(each(x.clone()), model(x.clone()), rtol=1e-9, atol=1e-9)


VERBS = {
    "fuse": lambda m, **o: bn.fuse(m, batch(), **o),
    "drop_bias": lambda m, **o: bn.drop_bias(m, batch(), **o),
    "fold": lambda m: bn.fold(m, batch()),
    "convert": lambda m, **o: bn.convert(m, "group", example=batch(), **o),
    "calibrate": lambda m: bn.calibrate(m, BATCHES),
    "adapt": lambda m: bn.adapt(m, BATCHES),
}


@pytest.mark.parametrize("verb", ["fuse", "drop_bias", "fold", "convert"])
def test_a_verb_that_could_change_nothing_raises_and_names_the_layers(verb):
    model = network(Doubled)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if verb != "fold":
        with pytest.raises(bn.BatchNormError, match="nothing could be changed"):
            VERBS[verb](model, optimizer=optimizer)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
    with pytest.raises(bn.BatchNormError, match=rf"^{verb}: nothing could be changed \(.*Doubled.*; replace these"):
        VERBS[verb](model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model[1] = nn.BatchNorm2d(6).double()  # one that it knows: then the other is in the report
    _, report = VERBS[verb](model)
    assert report.changes
    assert any("Doubled" in why for why in report.left.values())


@pytest.mark.parametrize("verb", ["fuse", "fold", "convert", "calibrate", "adapt"])
def test_a_norm_that_is_no_subclass_of_torchs_is_not_passed_over(verb):
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: "):
        VERBS[verb](network(Silent))


def test_a_mixed_model_names_it_in_the_report():
    model = network(Silent)
    model[1] = nn.BatchNorm2d(6).double()
    assert "Silent keeps statistics in a way of its own" in bn.calibrate(model, BATCHES)[1].report.left["3"]
    assert "3" in bn.convert(model, "group", example=batch())[1].left


def test_insert_sees_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Silent(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    _, report = bn.insert(model, torch.randn(2, 3, 8, 8), ["0", "3"])
    assert report.left == {"0": "a norm follows already"}


def test_recomputation_updates_it_once():
    layer = Silent(4)
    x = torch.randn(8, 4, 3, 3, requires_grad=True)
    expected = copy.deepcopy(layer)
    expected(x)
    bn.update_once(layer)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(layer.running_mean, expected.running_mean)


def test_its_gamma_is_not_decayed():
    layer = Silent(4)
    _, spared = bn.param_groups(nn.Sequential(nn.Conv2d(3, 4, 3), layer), weight_decay=0.1)
    assert any(p is layer.weight for p in spared["params"])


def test_classes_that_were_built_frozen():
    torchvision()
    kind = pytest.importorskip("timm.layers").FrozenBatchNormAct2d
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4), nn.Conv2d(4, 4, 3), torchvision().ops.FrozenBatchNorm2d(4))
    for layer in (model[1], model[3]):
        layer.running_mean.uniform_()
        layer.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 9, 9)
    folded, report = bn.fold(model, x)
    assert {"1", "3"} <= set(report.paths)
    torch.testing.assert_close(folded(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert bn.convert(model, "sync")[1].left.keys() == {"1", "3"}


@pytest.mark.parametrize("synced", [False, True])
def test_accumulated_micro_batches_count_once(synced):
    layer = NormAct(4).double()
    layer = bn.convert(layer, "sync")[0] if synced else layer
    x = torch.randn(32, 4, 3, 3, dtype=torch.float64) + 3
    with bn.accumulate(layer):
        for micro in x.split(8):
            layer(micro)
        assert int(layer.num_batches_tracked) == 0
    assert int(layer.num_batches_tracked) == 1
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2, 3)))
