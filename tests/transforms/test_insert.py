"""``insert``: BN before each nonlinearity; what a layer with a norm behind it is; the function preserved."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batchnorm as bn
from batchnorm.errors import NotEquivalent
from batchnorm.layers.normed import Normed, append_norm
from batchnorm.transforms.fold import fold


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """Module and functional activations, a skip connection, a shared layer, control flow, dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False)
        self.skip = nn.Conv2d(6, 6, 1)
        self.shared = nn.Conv2d(4, 4, 1)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        x = self.act1(self.conv1(x))
        x = F.relu(self.conv2(x)) + self.skip(x)
        x = torch.tanh(self.up(x))
        for _ in range(2):
            x = self.shared(x).relu()
        x = self.drop(x.mean((2, 3)))
        if x.shape[0] > 0:
            x = self.hidden(x).sigmoid()
        return self.out(x)


EXAMPLE = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
DEFAULT = ("conv1", "conv2", "up", "hidden")


def test_by_default_before_each_nonlinearity():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    normed, report = bn.insert(model, EXAMPLE)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert report.paths == DEFAULT
    assert dict(report.left) == {
        "skip": "no nonlinearity follows: its output goes to add",
        "shared": "it is called 2 times, and each place would need a norm of its own",
        "out": "no nonlinearity follows: the model returns its output",
    }
    assert report.certificate is None
    assert isinstance(normed.conv1.norm, bn.BatchNorm2d)
    assert isinstance(normed.hidden.norm, bn.BatchNorm1d)
    assert normed.conv2.norm.num_features == 6
    assert [m.training for m in (normed.conv1, normed.conv1.norm)] == [True, True]
    lost = {f"{path}.bias" for path in ("conv1", "conv2", "hidden")}
    own = {key for key in normed.state_dict() if ".norm." not in key}
    assert own == set(before) - lost
    # What comes to each nonlinearity is normalised.
    found = normed.conv1(EXAMPLE)
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.var((0, 2, 3), correction=0), torch.ones(6), atol=1e-3, rtol=0)
    normed(EXAMPLE).sum().backward()
    assert all(p.grad is not None for p in normed.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preserve_keeps_the_function_of_a_trained_network(dtype):
    model = Net().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    model.conv2.eval()
    data = [(torch.randn(n, 3, 8, 8, dtype=dtype) * 2 + 1, "label") for n in (16, 5)]
    normed, report = bn.insert(model, EXAMPLE.to(dtype), preserve=data)
    assert report.certificate.relative <= (1e-5 if dtype == torch.float32 else 1e-12)
    assert [m.training for m in (normed, normed.conv1, normed.conv2, normed.conv2.norm)] == [True, True, False, False]
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    torch.testing.assert_close(normed.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-5)
    # The statistics are those of the data, without the bias that went.
    y = torch.cat([model.conv1(batch) for batch, _ in data])
    layer = normed.conv1.norm
    torch.testing.assert_close(layer.running_mean, y.mean((0, 2, 3)) - model.conv1.bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_var, y.var((0, 2, 3)), rtol=1e-4, atol=0)
    torch.testing.assert_close(layer.weight, (layer.running_var + layer.eps).sqrt(), rtol=1e-5, atol=0)


def test_gradients_in_evaluation_stay_too():
    model = Net().double().eval()
    x = EXAMPLE.double()
    assert bn.insert(model, x)[1].gradients is None
    normed, report = bn.insert(model, x, preserve=x)
    assert report.gradients.what == "gradients in evaluation mode"
    assert report.gradients.relative <= 1e-9
    for each in (model, normed):
        each(x).square().sum().backward()
    for path in DEFAULT:
        torch.testing.assert_close(getattr(normed, path).weight.grad, getattr(model, path).weight.grad)
    # What the bias learned, beta learns now.
    torch.testing.assert_close(normed.conv1.norm.bias.grad, model.conv1.bias.grad)


@pytest.mark.parametrize("name", ["conv1", "out"])
def test_a_gradient_that_is_lost_is_found(monkeypatch, name):
    from batchnorm.transforms import insert as module

    def spoil(layer, norm, **rest):
        append_norm(layer, norm, **rest)
        if layer.weight.shape[0] == {"conv1": 6, "out": 2}[name]:
            layer.norm.register_forward_hook(lambda m, arguments, made: made.detach() + 0.5 * (made - made.detach()))

    monkeypatch.setattr(module, "append_norm", spoil)
    with pytest.raises(NotEquivalent, match="in evaluation, gradients would differ by"):
        bn.insert(Net(), EXAMPLE, name, preserve=EXAMPLE)


class Still(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


def test_a_gradient_of_one_weight_that_is_lost_is_found(monkeypatch):
    from batchnorm.transforms import insert as module

    def spoil(layer, norm, **rest):
        append_norm(layer, norm, **rest)
        layer.get_submodule("layer").__class__ = Still

    monkeypatch.setattr(module, "append_norm", spoil)
    with pytest.raises(NotEquivalent, match="in evaluation, gradients would differ by"):
        bn.insert(Net(), EXAMPLE, "hidden", preserve=EXAMPLE)


def test_where_rounding_moves_gradients_float64_decides(monkeypatch):
    from batchnorm.transforms import insert as module

    monkeypatch.setattr(module, "GRADIENTS", {torch.float32: 1e-12, torch.float64: 1e-12})
    _, report = bn.insert(Net(), EXAMPLE, preserve=EXAMPLE)
    assert report.gradients.what.startswith("gradients in evaluation mode, in float64 (in the model's own numbers: ")
    assert report.gradients.relative <= 1e-12


def test_no_gradients_are_claimed_where_none_were_compared():
    class Inference(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(WithoutBackward.apply(self.a(x).relu())).relu()

    _, report = bn.insert(Inference(), torch.randn(4, 3), preserve=torch.randn(8, 3))
    assert report.paths == ("a", "b")
    assert report.certificate.relative < 1e-5
    assert report.gradients is None


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("made for inference")


class Standardised(nn.Conv2d):
    """As timm's ScaledStdConv2d: a forward of its own, which reads the bias."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, None, self.stride, self.padding) + self.bias[:, None, None]


def test_a_layer_whose_class_computes_its_weight():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).double().eval()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    normed, report = bn.insert(model, x, preserve=[x])
    assert report.paths == ("0", "2")
    assert [normed[i].bias is None for i in (0, 2)] == [False, True]
    torch.testing.assert_close(normed.eval()(x), model(x), rtol=1e-10, atol=1e-12)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.attention = nn.Linear(6, 6), nn.MultiheadAttention(6, 2)

    def forward(self, x):
        return self.attention(*[self.layer(x).relu()] * 3)[0]


def test_a_layer_that_is_read_but_not_called():
    _, report = bn.insert(Attending(), torch.randn(5, 4, 6))
    assert report.left == {
        "attention.out_proj": "multi_head_attention_forward (a function) reads its numbers, without a call of it"
    }


def test_fold_takes_it_away_again():
    model = Net()
    normed, _ = bn.insert(model, EXAMPLE, preserve=EXAMPLE)
    folded, report = fold(normed, EXAMPLE)
    assert not report.left
    torch.testing.assert_close(folded(EXAMPLE), model.eval()(EXAMPLE), rtol=1e-4, atol=1e-5)


def test_where_and_only_and_after():
    model = Net()
    assert bn.insert(model, EXAMPLE, ["skip", "up"])[1].paths == ("skip", "up")
    assert bn.insert(model, EXAMPLE, "out")[1].paths == ("out",)
    assert bn.insert(model, EXAMPLE, "act1")[1].paths == ("act1",)
    assert bn.insert(model, EXAMPLE, lambda path, m: path == "skip")[1].paths == ("skip",)
    assert bn.insert(model, EXAMPLE, only="linear")[1].paths == ("hidden",)
    assert bn.insert(model, EXAMPLE, only="conv")[1].paths == DEFAULT[:3]
    after, report = bn.insert(model, EXAMPLE, after_activation=True, preserve=EXAMPLE)
    assert report.paths == ("act1",)
    assert report.left["conv2"] == "relu is called as a function: there is no place behind it"
    assert after.conv1.bias is not None
    assert isinstance(after.act1, nn.ReLU)
    assert report.certificate.relative < 1e-5


@pytest.mark.parametrize(
    ("norm", "keeps_bias"), [("group", True), ("instance", False), ("ghost", False), ("rms", True)]
)
def test_other_bricks(norm, keeps_bias):
    normed, report = bn.insert(Net(), EXAMPLE, norm=norm, only="conv")
    assert report.paths == DEFAULT[:3]
    assert (normed.conv1.bias is not None) == keeps_bias
    normed(EXAMPLE).sum().backward()
    if norm != "ghost":
        with pytest.raises(bn.BatchNormError, match="cannot keep the function"):
            bn.insert(Net(), EXAMPLE, norm=norm, only="conv", preserve=EXAMPLE)


def test_optimisers_follow():
    model = Net()
    heads = list(model.hidden.parameters())
    slow = torch.optim.SGD([{"params": heads, "lr": 0.01}, {"params": [model.out.weight]}], lr=0.1, momentum=0.9)
    fast = torch.optim.Adam([p for p in model.parameters() if all(p is not q for q in (*heads, model.out.weight))])
    model(EXAMPLE).square().sum().backward()
    slow.step()
    fast.step()
    kept = slow.state[model.hidden.weight]["momentum_buffer"].clone()
    normed, _ = bn.insert(model, EXAMPLE, optimizer=(slow, fast))
    held = [p for o in (slow, fast) for g in o.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in normed.parameters()}
    assert len(held) == len({id(p) for p in held})
    assert [id(p) for p in slow.param_groups[0]["params"]] == [
        id(p) for p in (normed.hidden.weight, normed.hidden.norm.weight, normed.hidden.norm.bias)
    ]
    assert torch.equal(slow.state[normed.hidden.weight]["momentum_buffer"], kept)
    normed(EXAMPLE).square().sum().backward()
    slow.step()
    fast.step()
    assert not torch.equal(normed.hidden.norm.bias, torch.zeros(8))


def test_nothing_changes_if_it_fails():
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(optimizer.param_groups[0]["params"])
    with pytest.raises(NotEquivalent):
        bn.insert(model, EXAMPLE, preserve=EXAMPLE, optimizer=optimizer, tolerance=1e-30)
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    assert type(model.conv1) is nn.Conv2d


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.has = nn.Linear(3, 3)
        self.rows = nn.Linear(3, 3)
        self.read = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        x = self.bn(self.has(x)).relu()
        return self.rows(x.unsqueeze(1)).relu(), self.read(x).relu() + self.read.bias


def test_what_is_left_alone():
    normed, report = bn.insert(Odd(), torch.randn(4, 3))
    assert dict(report.left) == {
        "has": "a norm follows already",
        "unused": "this example does not reach it",
    }
    assert report.paths == ("rows", "read")
    assert normed.read.bias is not None
    with pytest.raises(bn.BatchNormError, match=r"there is no place for a norm \(has and 4 more: a norm follows"):
        bn.insert(normed, torch.randn(4, 3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": "convs"}, "only is 'convs'"),
        ({"where": ["nothing"]}, "the model has no layer 'nothing'"),
        ({"where": "bn", "norm": "weight"}, "weight normalisation is not put behind a layer"),
        ({"where": "unused"}, "that is called"),
        ({"where": "has", "preserve": []}, "a norm follows already"),
        ({"preserve": []}, "there are no batches"),
        ({"preserve": torch.full((3, 3), float("nan"))}, "NaN or infinite"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(bn.BatchNormError, match=words):
        bn.insert(Odd(), torch.randn(4, 3), **arguments)


# ---- a layer with a norm behind it


def of_one_conv():
    conv = nn.Conv2d(3, 4, 3)
    append_norm(conv, nn.BatchNorm2d(4))
    with torch.no_grad():
        conv.norm.running_mean.uniform_(-1, 1)
        conv.norm.weight.uniform_(0.5, 2)
    return conv


def test_keys_and_loading():
    model, fresh = nn.Sequential(of_one_conv()), nn.Sequential(of_one_conv())
    keys = ["0.weight", "0.bias", *(f"0.norm.{k}" for k in nn.BatchNorm2d(4).state_dict())]
    state = model.state_dict()
    assert list(state) == keys
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(model.eval()(x), fresh.eval()(x))
    assert list(model[0].state_dict()) == [key[2:] for key in keys]
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({k: v for k, v in state.items() if k != "0.weight"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**state, "0.strange": torch.ones(1)})
    plain = nn.Conv2d(3, 4, 3).state_dict()
    loaded = fresh.load_state_dict({f"0.{k}": v for k, v in plain.items()}, strict=False)
    assert all(".norm." in key for key in loaded.missing_keys)
    assert torch.equal(fresh[0].weight, plain["weight"])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
def test_copies(how):
    conv, x = of_one_conv().eval(), torch.randn(2, 3, 5, 5)
    if how == "torch":
        file = io.BytesIO()
        torch.save(conv, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(conv) if how == "deepcopy" else pickle.loads(pickle.dumps(conv))
    assert type(other) is type(conv)
    assert torch.equal(other(x), conv(x))
    with torch.no_grad():
        other.weight.zero_()
    assert bool(conv.weight.abs().sum() > 0)


def test_it_is_still_its_class_and_the_same_object():
    conv = nn.Conv2d(3, 4, 3, stride=2)
    seen = []
    conv.register_forward_hook(lambda m, a, y: seen.append(y))
    weight = conv.weight
    append_norm(conv, nn.BatchNorm2d(4))
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(conv, Normed)
    assert conv.weight is weight
    assert conv.stride == (2, 2)
    y = conv(torch.randn(4, 3, 8, 8))
    assert len(seen) == 1
    assert seen[0] is y
    conv.bias = None
    assert conv.layer.bias is None
    conv.eval()
    assert not conv.norm.training
    assert not conv.layer.training
    with pytest.raises(AttributeError, match="no_such"):
        _ = conv.no_such
    assert conv.to(torch.bfloat16).weight.dtype == torch.bfloat16
    assert len(list(conv.parameters())) == 3


def test_compiled():
    conv, x = of_one_conv().eval(), torch.randn(2, 3, 5, 5)
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), conv(x))
