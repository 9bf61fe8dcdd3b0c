"""``insert`` behind linear layers over the last axis: the features are channels, every position is a row."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batchnorm as bn
from batchnorm import reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Feed(nn.Module):
    """What a transformer does between its attentions; ``view`` wants memory in order."""

    def __init__(self, activation=nn.GELU):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 8), activation(), nn.Linear(8, 6)
        self.gate = nn.Linear(6, 8)

    def forward(self, x):
        hidden = self.act(self.up(x)) + F.silu(self.gate(x))
        return x + self.down(hidden.view(-1, 8)).view(x.shape)


SHAPES = [(5, 7, 6), (3, 4, 5, 6), (2, 3, 2, 3, 6), (1, 9, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trained_network_keeps_its_function_and_fold_takes_the_norms_away(shape, dtype):
    model, x = Feed().to(dtype).eval(), torch.randn(shape, dtype=dtype)
    normed, report = bn.insert(model, x, preserve=[x, 2 * x + 1])
    assert report.paths == ("up", "gate")
    assert (normed.up.bias, report.gradients is None) == (None, False)
    wide, plain = copy.deepcopy(normed).double(), copy.deepcopy(model).double()
    other = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(wide(other), plain(other), rtol=1e-5, atol=1e-6)
    folded, report = bn.fold(normed, x)
    assert not report.left
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_training_all_positions_are_one_batch(shape):
    x = torch.randn(shape, dtype=torch.float64)
    normed, _ = bn.insert(Feed().double(), x)
    normed.train()
    got = normed.up(x)
    rows = F.linear(x, normed.up.weight).flatten(0, -2)
    expected = reference.normalize(rows.detach().numpy(), "batch").y
    torch.testing.assert_close(got.detach(), torch.as_tensor(expected).view_as(got))
    assert got.is_contiguous()
    torch.testing.assert_close(normed.up.norm.running_mean, 0.1 * rows.mean(0))


@pytest.mark.parametrize(("norm", "keeps_bias"), [("layer", True), ("rms", True), ("group", True), ("ghost", False)])
def test_other_bricks_normalise_each_position(norm, keeps_bias):
    x = torch.randn(4, 5, 6)
    normed, report = bn.insert(Feed(), x, norm=norm, **({"groups": 2} if norm == "group" else {}))
    assert report.paths == ("up", "gate")
    assert (normed.up.bias is not None) == keeps_bias
    if norm == "layer":
        rows = F.linear(x, normed.up.weight, normed.up.bias)
        torch.testing.assert_close(normed.up(x), F.layer_norm(rows, (8,)))
    normed(x).sum().backward()


def test_behind_the_activation_and_where():
    x = torch.randn(4, 5, 6)
    after, report = bn.insert(Feed(), x, after_activation=True, preserve=[x])
    assert report.paths == ("act",)
    assert after.act.norm.num_features == 8
    made = after.train().act(torch.randn(4, 5, 8)).flatten(0, 1)
    torch.testing.assert_close(made.mean(0), after.act.norm.bias)
    chosen, report = bn.insert(Feed(), x, "down", preserve=[x])
    assert report.paths == ("down",)
    assert chosen.down.norm.num_features == 6


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_normalise_rows_too(how):
    x = torch.randn(4, 5, 6)
    normed, _ = bn.insert(Feed(), x, preserve=[x])
    torch.testing.assert_close(how(normed).eval()(x), normed.eval()(x))


class Moved(nn.Module):
    """Between a layer and its nonlinearity, numbers move to other places."""

    def __init__(self):
        super().__init__()
        self.up, self.drop, self.depthwise = nn.Linear(6, 8), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.heads, self.soft, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x):
        n, t = x.shape[:2]
        x = self.drop(self.up(x)).transpose(1, 2).reshape(n, 8, t // 4, 4).contiguous()
        x = self.depthwise(F.relu(x)).flatten(2).mT
        x = F.gelu(x)
        x = self.heads(x).view(n, t, 2, 4).permute(0, 2, 1, 3).tanh() + self.soft(x).view(n, t, 2, 4).mT.mT.softmax(
            -1
        ).transpose(1, 2)
        return self.down(x.transpose(1, 2).flatten(2))


def test_a_nonlinearity_may_come_after_numbers_have_moved():
    model, x = Moved().eval(), torch.randn(3, 8, 6)
    normed, report = bn.insert(model, x, preserve=[x])
    assert report.paths == ("up", "depthwise", "heads")
    assert report.left["soft"].startswith("no nonlinearity follows: its output goes to")
    other = torch.randn(3, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(normed.double()(other), model.double()(other), rtol=1e-5, atol=1e-6)


class Repeated(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.body = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("layers", [2, 30])
def test_a_refusal_is_one_sentence_however_many_layers_there_are(layers):
    with pytest.raises(bn.BatchNormError) as raised:
        bn.insert(Repeated(layers), torch.randn(4, 4))
    assert str(raised.value) == (
        f"insert: there is no place for a norm (body.0 and {layers - 1} more: a norm follows already; head: no "
        "nonlinearity follows: the model returns its output); where=[...] puts norms behind layers that no "
        "nonlinearity follows"
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.ReLU(), r"\(it has no convolution and no linear layer\); give a model with a convolution"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"\(0: a norm follows already\); give a model with"),
    ],
)
def test_where_no_place_is_left_at_all(model, words):
    with pytest.raises(bn.BatchNormError, match=words):
        bn.insert(model, torch.randn(3, 4))
