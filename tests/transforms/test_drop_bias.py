"""``drop_bias``: both functions stay, optimisers follow, and what must stay is named."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batchnorm as bn
from batchnorm.errors import NotEquivalent


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def disturbed(model):
    """Statistics, gamma and beta as after training, never 0 and 1."""
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                if m.running_mean is not None:
                    m.running_mean.uniform_(-1, 1)
                    m.running_var.uniform_(0.5, 2)
                if m.affine:
                    m.weight.uniform_(0.5, 2)
                    m.bias.uniform_(-1, 1)
    return model


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.bn_a = norm(6)
        self.b = nn.ConvTranspose2d(6, 4, 3)
        self.hand_on = nn.Identity()
        self.bn_b = norm(4) if norm is bn.BatchRenorm else norm(4, track_running_stats=False)
        self.head = nn.Linear(4, 5)
        self.bn_head = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = F.relu(self.bn_a(self.a(x)))
        x = self.drop(torch.relu(self.bn_b(self.hand_on(self.b(x)))).mean((2, 3)))
        return self.out(self.bn_head(self.head(x)).tanh())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, bn.BatchNorm2d, bn.GhostBatchNorm, bn.BatchRenorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_functions_stay(norm, dtype):
    model = disturbed(Net(norm)).to(dtype)
    model.out.eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 3, 6, 6, dtype=dtype)
    lean, report = bn.drop_bias(model, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in lean.modules()] == [m.training for m in model.modules()]
    assert (lean.a.bias, lean.b.bias, lean.head.bias) == (None, None, None)
    assert report.left == {"out": "the model returns its output"}
    assert report.certificate.relative <= (1e-5 if dtype == torch.float32 else 1e-12)
    for mode in (False, True):
        one, other = (m.train(mode) for m in (copy.deepcopy(model), copy.deepcopy(lean)))
        one.drop.eval()
        other.drop.eval()
        torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-4)
        if mode:  # and what is remembered of the batch fits the layer without its bias
            one.eval()
            other.eval()
            torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_kind_of_convolution(dims):
    for kind in (f"Conv{dims}d", f"ConvTranspose{dims}d"):
        model = disturbed(nn.Sequential(getattr(nn, kind)(2, 4, 3), getattr(nn, f"BatchNorm{dims}d")(4)))
        lean, _ = bn.drop_bias(model, torch.randn(4, 2, *[5] * dims))
        assert lean[0].bias is None
        assert torch.allclose(lean[1].running_mean, model[1].running_mean - model[0].bias)


def test_optimisers_follow():
    model = Net()
    biases = [model.a.bias, model.b.bias, model.head.bias]
    rest = [p for p in model.parameters() if all(p is not b for b in biases)]
    split = torch.optim.Adam([{"params": biases, "lr": 1.0}, {"params": rest[:4], "weight_decay": 0.1}])
    other = torch.optim.SGD(rest[4:], lr=0.1, momentum=0.9)
    model(torch.randn(8, 3, 6, 6)).square().sum().backward()
    split.step()
    other.step()
    states = [split.state[p]["exp_avg"].clone() for p in rest[:4]]
    lean, _ = bn.drop_bias(model, torch.randn(8, 3, 6, 6), optimizer=[split, other])
    assert [len(g["params"]) for g in split.param_groups] == [0, 4]
    assert [g["lr"] for g in split.param_groups] == [1.0, 0.001]
    mine = list(lean.parameters())
    held = [p for o in (split, other) for g in o.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in mine}
    assert len(split.state) == 4
    for p, state in zip(split.param_groups[1]["params"], states, strict=True):
        assert torch.equal(split.state[p]["exp_avg"], state)
    lean(torch.randn(8, 3, 6, 6)).square().sum().backward()
    old = lean.a.weight.detach().clone()
    split.step()
    other.step()
    assert not torch.equal(lean.a.weight, old)


class Left(nn.Module):
    """Everything that may not lose its bias."""

    def __init__(self):
        super().__init__()
        self.returned = nn.Linear(3, 3)
        self.two_readers = nn.Linear(3, 3)
        self.sequence = nn.Linear(3, 3)
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.before_frozen = nn.Linear(3, 3)
        self.looked_at = nn.Linear(3, 3)
        self.dropped = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3), name="bias", dim=None)
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(8))
        self.frozen = bn.FrozenBatchNorm(3)
        self.drop = nn.Dropout()

    def forward(self, x):
        n, y = self.norms, self.returned(x)
        z = self.two_readers(x)
        return (
            y,
            n[0](y),
            n[1](z) + z,
            n[2](self.sequence(x.unsqueeze(1).expand(4, 3, 3))),
            n[3](self.one(x)) + n[3](self.other(x)),
            self.frozen(self.before_frozen(x)),
            n[4](self.looked_at(x)) + self.looked_at.bias,
            n[5](self.drop(self.dropped(x))),
            n[6](self.normed(x)),
        )


def test_what_stays_has_its_reason():
    model = Left()
    lean, report = bn.drop_bias(model, torch.randn(4, 3))
    assert report.changes == ()
    assert dict(report.left) == {
        "returned": "the model returns its output",
        "two_readers": "its output is read by norms.1, add",
        "sequence": "it is linear in the last axis, and norms.2 normalises axis 1",
        "one": "norms.3 is also fed by other, which has another bias",
        "other": "norms.3 is also fed by one, which has another bias",
        "before_frozen": "frozen always uses its running statistics (frozen), and so does not cancel a bias",
        "looked_at": "something else reads its bias",
        "dropped": "its output goes to drop, which is not a BN layer",
        "unused": "this example does not reach it",
        "normed": "its bias is computed from something else",
    }
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in lean.state_dict().items())


def test_a_layer_used_twice_for_two_norms():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.n1, self.n2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.n1(self.linear(x)) + self.n2(self.linear(-x))

    model = disturbed(Shared())
    lean, report = bn.drop_bias(model, torch.randn(6, 3))
    assert report.paths == ("linear", "n1", "n2")
    assert torch.allclose(lean.n2.running_mean, model.n2.running_mean - model.linear.bias)


def test_nothing_changes_if_the_function_would():
    model = disturbed(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(optimizer.param_groups[0]["params"])
    with pytest.raises(NotEquivalent, match="would differ"):
        bn.drop_bias(model, torch.randn(4, 3, 6, 6), optimizer=optimizer, tolerance=1e-30)
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    with pytest.raises(bn.BatchNormError, match="holds no parameter of this model"):
        bn.drop_bias(nn.Linear(2, 2), torch.randn(2, 2), optimizer=optimizer)


def test_one_example_is_enough_for_evaluation():
    lean, _ = bn.drop_bias(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.randn(1, 3))
    assert lean[0].bias is None


# ---- training goes on


def gradients(model, x, training):
    """Of every parameter, in a run of its own, without dropout; and the buffers after it."""
    model = copy.deepcopy(model).train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    (model(x) * torch.linspace(-1, 1, 2, dtype=x.dtype)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_all_that_stays_are_the_same(training):
    model = disturbed(Net()).double()
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    lean, report = bn.drop_bias(model, x)
    assert report.gradients.what == "gradients"
    assert report.gradients.relative <= 1e-12
    (old, old_buffers), (new, new_buffers) = (gradients(m, x, training) for m in (model, lean))
    assert set(old) - set(new) == {"a.bias", "b.bias", "head.bias"}
    for name, gradient in new.items():
        torch.testing.assert_close(gradient, old[name], rtol=1e-9, atol=1e-9)
    if training:
        assert all(float(old[f"{path}.bias"].abs().max()) < 1e-9 for path in ("a", "b", "head"))
        torch.testing.assert_close(new_buffers["bn_a.running_mean"] + model.a.bias, old_buffers["bn_a.running_mean"])


def spoilt(monkeypatch, how):
    from batchnorm.transforms import drop_bias as module

    take = module.take_bias

    def take_and_spoil(path, layer, norms):
        changes = take(path, layer, norms)
        how(layer, next(iter(norms.values())))
        return changes

    monkeypatch.setattr(module, "take_bias", take_and_spoil)


def no_gradient(layer, norm):
    layer.register_forward_hook(lambda module, arguments, made: made.detach())


def half_a_gradient(layer, norm):
    layer.register_forward_hook(lambda module, arguments, made: made / 2 + made.detach() / 2)


def other_momentum(layer, norm):
    norm.momentum = 0.2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (no_gradient, "gradients of 0.weight would differ"),
        (half_a_gradient, "gradients of 0.weight would differ"),
        (other_momentum, "buffers of 1.running_mean would differ"),
    ],
)
def test_what_changes_training_alone_is_found(monkeypatch, how, words):
    spoilt(monkeypatch, how)
    model = disturbed(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))
    with pytest.raises(NotEquivalent, match=words):
        bn.drop_bias(model, torch.randn(8, 3))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 2000), (torch.bfloat16, 300)])
def test_where_rounding_moves_gradients_float64_decides(dtype, size):
    """Biases so large that rounding moves the gradients too far on any of torch's instruction sets, not the outputs."""
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    model = disturbed(nn.Sequential(*layers))
    with torch.no_grad():
        for layer in layers[::3]:
            layer.bias.mul_(size)
    _, report = bn.drop_bias(model.to(dtype), torch.randn(4, 4, 6, 6, dtype=dtype))
    assert report.gradients.what.startswith("gradients in float64")
    assert report.gradients.relative <= 1e-9


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("made for inference")


class Inference(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(WithoutBackward.apply(self.bn(self.linear(x)))).relu()


def test_no_gradients_are_claimed_where_none_were_compared():
    lean, report = bn.drop_bias(Inference(), torch.randn(4, 3))
    assert lean.linear.bias is None
    assert report.gradients is None
    _, report = bn.drop_bias(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(1, 3))
    assert report.gradients is None


class Counted(nn.Sequential):
    runs = 0

    def forward(self, x):
        Counted.runs += 1
        return super().forward(x)


def test_where_no_bias_is_cancelled_nothing_is_compared():
    model, x = Counted(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), torch.randn(4, 3, 6, 6)
    Counted.runs = 0
    lean, report = bn.drop_bias(model, x)
    assert (report.changes, report.certificate, report.gradients) == ((), None, None)
    assert Counted.runs <= 2
    assert torch.equal(lean.eval()(x), model.eval()(x))


def test_outputs_with_batch_statistics_are_compared_where_gradients_cannot_be(monkeypatch):
    from batchnorm.transforms import drop_bias as module

    compared = []
    kept = module.verify
    monkeypatch.setattr(module, "verify", lambda *a, verb, **more: compared.append(verb) or kept(*a, verb=verb, **more))
    monkeypatch.setattr(module, "_verify_gradients", lambda *given: None)
    bn.drop_bias(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(8, 3))
    assert compared == ["drop_bias", "drop_bias, with batch statistics"]
