"""The error classes, and the sentence that each mistake gets."""

import copy
import pickle

import pytest
import torch

import batchnorm as bn
from batchnorm.functional import batch_norm


def layer(**arguments):
    return bn.BatchNorm2d(24, **arguments)


X = torch.zeros(4, 24, 3, 3)
MEAN, VAR = torch.zeros(24), torch.ones(24)

# Name -> the mistake; what the sentence must say: where, what was given, why, and what to do.
MISTAKES = {
    "one value per channel": (
        lambda: bn.BatchNorm1d(24)(torch.zeros(1, 24)),
        ["BatchNorm1d: ", "more than 1 value per channel", "[1, 24]", "its own mean"],
        ["drop_last", "larger batches", "running"],
    ),
    "one value per channel in an image": (
        lambda: layer()(torch.zeros(1, 24, 1, 1)),
        ["BatchNorm2d: ", "more than 1 value per channel", "[1, 24, 1, 1]"],
        ["drop_last", "eval()"],
    ),
    "one value per channel for an update": (
        lambda: bn.BatchNorm1d(24, statistics="running")(torch.zeros(1, 24)),
        ["BatchNorm1d: ", "more than 1 value per channel to update", "[1, 24]", "no variance"],
        ["update=False"],
    ),
    "too many dimensions for 1d": (
        lambda: bn.BatchNorm1d(24)(X),
        ["BatchNorm1d: expected 2D or 3D input (got 4D input", "[4, 24, 3, 3]"],
        ["BatchNorm2d"],
    ),
    "too few dimensions for 2d": (
        lambda: layer()(X[:, :, 0]),
        ["BatchNorm2d: expected 4D input (got 3D input", "[4, 24, 3]"],
        ["BatchNorm1d"],
    ),
    "too few dimensions for 3d": (
        lambda: bn.BatchNorm3d(24)(X),
        ["BatchNorm3d: expected 5D input (got 4D input"],
        ["BatchNorm2d"],
    ),
    "one dimension for 1d": (
        lambda: bn.BatchNorm1d(24)(X[0, :, 0, 0]),
        ["BatchNorm1d: expected 2D or 3D input (got 1D input", "[24]"],
        ["(batch, channels, ...)"],
    ),
    "one dimension for the function": (
        lambda: batch_norm(X[0, :, 0, 0], None, None, training=True),
        ["batch_norm: ", "at least 2 dimensions", "[24]"],
        ["unsqueeze"],
    ),
    "channel count": (
        lambda: layer()(X[:, :5]),
        ["BatchNorm2d: ", "[4, 5, 3, 3]", "5 channels", "running_mean has shape [24]"],
        ["num_features=5", "permute"],
    ),
    "channel count without statistics": (
        lambda: layer(track_running_stats=False)(X[:, :5]),
        ["5 channels", "weight has shape [24]"],
        ["num_features=5"],
    ),
    "shape of the weight": (
        lambda: batch_norm(X, None, None, torch.ones(24, 1), training=True),
        ["batch_norm: ", "24 channels", "weight has shape [24, 1]"],
        ["num_features=24"],
    ),
    "shape of the bias": (
        lambda: batch_norm(X, MEAN, VAR, None, torch.ones(1)),
        ["bias has shape [1]"],
        ["num_features=24"],
    ),
    "shape of the variance": (lambda: batch_norm(X, MEAN, torch.ones(3)), ["running_var has shape [3]"], ["num_f"]),
    "integers": (
        lambda: layer()(X.int()),
        ["BatchNorm2d: expected a floating-point input, got torch.int32"],
        ["x.float()"],
    ),
    "double input to a float layer": (
        lambda: layer()(X.double()),
        ["BatchNorm2d: ", "the input is torch.float64", "torch.float32"],
        ["x.to(torch.float32)"],
    ),
    "float input to a bfloat16 layer": (
        lambda: layer(dtype=torch.bfloat16)(X),
        ["the input is torch.float32", "torch.bfloat16"],
        ["x.to(torch.bfloat16)"],
    ),
    "input elsewhere": (
        lambda: layer()(X.to("meta")),
        ["BatchNorm2d: the input is on meta, but running_mean is on cpu"],
        ["layer.to('meta')"],
    ),
    "layer elsewhere": (
        lambda: layer(device="meta")(X),
        ["the input is on cpu, but running_mean is on meta"],
        ["layer.to('cpu')"],
    ),
    "residual elsewhere": (
        lambda: layer()(X, residual=X.to("meta")),
        ["the input is on cpu, but the residual is on meta"],
        ["move one of them"],
    ),
    "shape of the residual": (
        lambda: layer()(X, residual=X[:1]),
        ["the residual has shape [1, 24, 3, 3], the input [4, 24, 3, 3]"],
        ["not broadcast"],
    ),
    "no running statistics in the function": (
        lambda: batch_norm(X, None, None),
        ["batch_norm: there are no running statistics"],
        ["training=True"],
    ),
    "no running statistics in the layer": (
        lambda: layer(track_running_stats=False, statistics="running")(X),
        ["BatchNorm2d: there are no running statistics"],
        ['statistics="batch"'],
    ),
    "half of the running statistics": (
        lambda: batch_norm(X, MEAN, None, training=True),
        ["batch_norm: running_var is missing"],
        ["both"],
    ),
    "the other half": (
        lambda: batch_norm(X, None, VAR, training=True),
        ["batch_norm: running_mean is missing"],
        ["both"],
    ),
    "eps": (lambda: layer(eps=-1.0)(X), ["BatchNorm2d: eps is -1.0"], ["a number from 0 up"]),
    "eps of zero in training": (lambda: layer(eps=0.0)(X), ["eps must be positive, got 0.0"], ["1e-5"]),
    "activation": (
        lambda: layer(activation="gelu"),
        ["BatchNorm2d: activation is 'gelu'"],
        ["'none', 'relu', 'relu6', 'leaky_relu', 'silu'"],
    ),
    "activation of the function": (
        lambda: batch_norm(X, MEAN, VAR, activation="gelu"),
        ["batch_norm: unknown activation 'gelu'"],
        ["none, relu, relu6, leaky_relu, silu"],
    ),
    "statistics": (lambda: layer(statistics="mini"), ["statistics is 'mini'"], ["'auto', 'batch', 'running'"]),
    "nonfinite": (lambda: layer(nonfinite="ignore"), ["nonfinite is 'ignore'"], ["'reject', 'raise'"]),
    "nonfinite of the function": (
        lambda: batch_norm(X, MEAN, VAR, nonfinite="ignore"),
        ["batch_norm: nonfinite is 'ignore'"],
        ["'reject' or 'raise'"],
    ),
    "update": (lambda: layer(update="always"), ["update is 'always'"], ["None, True, False"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_says_what_and_what_to_do(mistake, path):
    act, given, way_out = MISTAKES[mistake]
    with pytest.raises(bn.BatchNormError) as caught:
        act()
    sentence = str(caught.value)
    assert "\n" not in sentence
    problem, _, advice = sentence.partition("; ")
    for words in given:
        assert words in problem
    for words in way_out:
        assert words in advice
    assert isinstance(caught.value, ValueError)


def test_mistakes_made_after_construction(path):
    """They fail where they are made, and change nothing."""
    mistaken = layer()
    expected = mistaken(X)
    with pytest.raises(bn.BatchNormError, match="BatchNorm2d: activation is 'gelu'; use one of 'none', 'relu'"):
        mistaken.activation = "gelu"
    with pytest.raises(bn.BatchNormError, match=r"statistics is 'mini'; use one of 'auto', 'batch', 'running'"):
        mistaken.statistics = "mini"
    assert torch.equal(mistaken(X), expected)


@pytest.mark.parametrize("mistake", ["one value per channel", "channel count", "shape of the residual", "eps"])
def test_a_mistake_changes_no_buffer(mistake, path):
    inputs = {
        "one value per channel": (X[:1, :, :1, :1],),
        "channel count": (X[:, :5],),
        "shape of the residual": (X, X[:1]),
        "eps": (X,),
    }
    target = layer()
    if mistake == "eps":
        target.__dict__["eps"] = -1.0  # past the check of the attribute, as an old pickle may be
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(bn.BatchNormError):
        target(*inputs[mistake])
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_evaluation_takes_what_training_refuses(path):
    one = torch.randn(1, 24, 1, 1)
    stock = torch.nn.BatchNorm2d(24, eps=0.0).eval()
    assert torch.allclose(layer(eps=0.0).eval()(one), stock(one))


def test_parts_of_an_error():
    error = bn.BatchNormError("it is wrong", where="layer4.bn1", do="mend it")
    assert (error.problem, error.where, error.do) == ("it is wrong", "layer4.bn1", "mend it")
    assert str(error) == "layer4.bn1: it is wrong; mend it"
    assert str(bn.BatchNormError("it is wrong")) == "it is wrong"


@pytest.mark.parametrize("cls", [bn.BatchNormError, bn.NonFiniteBatch])
def test_errors_pickle_and_copy_whole(cls):
    error = cls("it is wrong", where="bn1", do="mend it")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert str(again) == str(error)
        assert (again.problem, again.where, again.do) == (error.problem, error.where, error.do)


def test_kinds_of_errors():
    assert issubclass(bn.BatchNormError, ValueError)
    assert issubclass(bn.NonFiniteBatch, bn.BatchNormError)
    assert issubclass(bn.NonFiniteBatch, FloatingPointError)
    assert issubclass(bn.BatchNormWarning, UserWarning)
