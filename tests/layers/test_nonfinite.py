"""A batch with NaN or infinite moments never enters the running statistics, whatever the user chose."""

import copy
import warnings

import pytest
import torch
from layer_cases import OURS, STOCK, example, same

import batchnorm as bn
from batchnorm.functional import batch_norm

DIMS = pytest.mark.parametrize("dims", [1, 2, 3])
BAD = pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
REJECTED = pytest.mark.filterwarnings("ignore::batchnorm.BatchNormWarning")


def spoilt(dims, value, last=False):
    x = example(dims, last=last)
    x[1, 5] = value
    x[2, 5] = -value  # so that a finite value that is too large overflows the variance
    return x


def assert_state(layer, state):
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(("dims", "last"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
@BAD
@pytest.mark.parametrize("momentum", [0.1, None])
def test_reject_warns_and_keeps_the_statistics(dims, last, value, momentum, path):
    layer = OURS[dims](24, momentum=momentum)
    layer(example(dims, last=last))
    before = copy.deepcopy(layer.state_dict())
    with pytest.warns(bn.BatchNormWarning) as caught:
        y = layer(spoilt(dims, value, last))
    assert_state(layer, before)
    assert y.shape == example(dims).shape
    (warning,) = caught
    sentence = str(warning.message)
    assert sentence.startswith(f"BatchNorm{dims}d: the batch has NaN or infinite values")
    assert "; look at the layer's input" in sentence
    assert "\n" not in sentence


class Net(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), bn.BatchNorm1d(4, **options), torch.nn.Linear(4, 4))
        self.last = bn.BatchNorm1d(4, **options)

    def forward(self, x):
        y = self.body(x)
        return self.last(y)


def line_of(function):
    """The line of the first statement of a function."""
    return function.__code__.co_firstlineno + 1


def test_the_warning_names_the_layer_and_points_at_the_users_line(path):
    model, bad = Net(), torch.full((5, 3), float("nan"))

    def call():
        model(bad)

    with pytest.warns(bn.BatchNormWarning) as caught:
        call()
    (warning,) = caught  # the last layer is given NaN by the first, and has nothing to add
    assert str(warning.message).startswith("body.1 (BatchNorm1d): the batch has NaN or infinite values")
    assert (warning.filename, warning.lineno) == (__file__, line_of(Net.forward))

    sequence = torch.nn.Sequential(model.body)
    with pytest.warns(bn.BatchNormWarning, match=r"^0\.1 \(BatchNorm1d\)") as caught:
        sequence(bad)  # no code of the user's in between: the line of the call
    assert caught[0].filename == __file__
    assert caught[0].lineno > line_of(Net.forward) + 10
    with pytest.raises(bn.NonFiniteBatch, match=r"^body\.1 \(BatchNorm1d\): the batch has"):
        Net(nonfinite="raise")(bad)


@pytest.mark.filterwarnings("always::batchnorm.BatchNormWarning")
def test_every_call_warns_once():
    model, bad = Net(), torch.full((5, 3), float("nan"))
    for batch in (bad, bad, bad.clone()):
        with pytest.warns(bn.BatchNormWarning) as caught:
            model(batch)
        assert len(caught) == 1
    for module, x, name in ((model.body, bad, "1 (BatchNorm1d)"), (model.last, bad[:, [0, 0, 0, 0]], "BatchNorm1d")):
        with pytest.warns(bn.BatchNormWarning) as caught:
            module(x)
        assert [str(w.message).partition(":")[0] for w in caught] == [name]


@DIMS
@BAD
def test_raise_raises_and_keeps_the_statistics(dims, value, path):
    layer = OURS[dims](24, nonfinite="raise", activation="relu")
    layer(example(dims))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(bn.NonFiniteBatch, match=f"BatchNorm{dims}d: the batch has NaN or infinite values.*; look at"):
        layer(spoilt(dims, value))
    assert_state(layer, before)


@REJECTED
@DIMS
@pytest.mark.parametrize("policy", ["reject", "raise"])
def test_a_later_good_batch_works(dims, policy, path):
    layer, stock = OURS[dims](24, nonfinite=policy, momentum=None), STOCK[dims](24, momentum=None)
    first, second = example(dims), example(dims)
    layer(first)
    try:
        layer(spoilt(dims, float("nan")))
    except bn.NonFiniteBatch:
        assert policy == "raise"
    layer(second)
    stock(first), stock(second)
    same(layer.running_mean, stock.running_mean)
    same(layer.running_var, stock.running_var)
    assert int(layer.num_batches_tracked) == 2


@REJECTED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_other_channels_of_the_output_are_right(dtype, path):
    stock, layer = torch.nn.BatchNorm2d(24, dtype=dtype), bn.BatchNorm2d(24, dtype=dtype)
    x = spoilt(2, float("nan")).to(dtype)
    y, z = layer(x), stock(x)
    good = [c for c in range(24) if c != 5]
    same(y[:, good], z[:, good])
    assert y[:, 5].isnan().all()
    assert layer.running_mean.abs().max() == 0


@pytest.mark.parametrize("switches", [{"statistics": "running"}, {"statistics": "batch"}], ids=str)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_under_every_switch_that_updates(switches, mode, path):
    layer = bn.BatchNorm2d(24, update=True, nonfinite="raise", **switches).train(mode)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(bn.NonFiniteBatch):
        layer(spoilt(2, float("inf")))
    assert_state(layer, before)


@pytest.mark.parametrize("policy", ["reject", "raise"])
def test_no_word_where_nothing_is_updated(policy, path):
    x = spoilt(2, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bn.BatchNorm2d(24, nonfinite=policy).eval()(x)
        bn.BatchNorm2d(24, nonfinite=policy, update=False)(x)
        bn.BatchNorm2d(24, nonfinite=policy, track_running_stats=False)(x)
        batch_norm(x, None, None, training=True, nonfinite=policy)


def test_the_function_has_the_same_choice(path):
    mean, var = torch.zeros(24), torch.ones(24)
    x = spoilt(2, float("nan"))
    with pytest.warns(bn.BatchNormWarning, match="batch_norm: the batch has NaN"):
        batch_norm(x, mean, var, training=True)
    with pytest.raises(bn.NonFiniteBatch, match="batch_norm: the batch has NaN"):
        batch_norm(x, mean, var, training=True, nonfinite="raise")
    assert mean.unique().tolist() == [0.0]
    assert var.unique().tolist() == [1.0]


@REJECTED
def test_gradients_of_a_rejected_batch_are_torchs(path):
    results, batch = [], spoilt(2, float("nan"))
    for cls in (torch.nn.BatchNorm2d, bn.BatchNorm2d):
        x = batch.clone().requires_grad_()
        layer = cls(24)
        layer(x).nan_to_num().pow(3).sum().backward()
        results.append((x.grad[:, :5], layer.bias.grad[:5]))
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)


@DIMS
@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu"])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_at_a_nan_and_under_an_infinite_gradient_the_slope_is_torchs(dims, activation, added, gradient, path):
    stock, layer = STOCK[dims](24).eval(), OURS[dims](24, activation=activation).eval()
    inputs = [example(dims) * 4, *([example(dims)] if added else [])]
    inputs[0].flatten(1)[:, 7] = float("nan")
    results = []
    for forward in (lambda x, *r: getattr(torch.nn.functional, activation)(sum(r, stock(x))), layer):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = forward(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, torch.full_like(y, gradient))))
    assert results[0][0].isnan().any()
    finite = inputs[0].isfinite()  # the gradient at a NaN itself is a NaN here
    results = [(y, torch.where(finite, dx, 0), *of_residual) for y, dx, *of_residual in results]
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
