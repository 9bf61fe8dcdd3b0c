"""The recurrent layers beside torch's own: the same function where normalisation does nothing, the same interface."""

import inspect
import itertools

import pytest
import torch
from recurrent_cases import (
    CELLS,
    KINDS,
    LAYERS,
    STATES,
    STOCK,
    STOCK_CELLS,
    identity,
    packed,
    sequences_of,
    states_of,
    tuple_of,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import batchnorm as bn

pytestmark = pytest.mark.filterwarnings("ignore:.*a batch of one sequence:batchnorm.errors.BatchNormWarning")

EVERY_SETTING = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in itertools.product((1, 2), (False, True), (False, True), (True, False))
]
SETTINGS = pytest.mark.parametrize("setting", EVERY_SETTING, ids=lambda s: "-".join(map(str, s.values())))
SHAPES = pytest.mark.parametrize("shape", ["batched", "unbatched", "packed"])
GIVEN = pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from states"])


def pair(kind, dtype=torch.float64, **setting):
    """Torch's layer and ours with the same weights, loaded as the documentation says."""
    stock = STOCK[kind](3, 4, dtype=dtype, **setting)
    ours = LAYERS[kind](3, 4, dtype=dtype, **setting)
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    report = ours.load_state_dict(stock.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all(key.startswith("norm_") for key in report.missing_keys)
    for name, value in stock.state_dict().items():
        assert torch.equal(value, before[name])
    return stock, ours


def input_of(shape, batch_first, dtype=torch.float64):
    if shape == "packed":
        return packed(sequences_of(dtype=dtype))
    x = torch.randn([7, 5, 3] if shape == "batched" else [7, 3], dtype=dtype)
    return x.transpose(0, 1).contiguous() if batch_first and shape == "batched" else x


@KINDS
@SETTINGS
@SHAPES
@GIVEN
def test_without_normalisation_it_is_torchs(kind, setting, shape, given):
    stock, ours = pair(kind, **setting)
    x = input_of(shape, setting["batch_first"])
    states = states_of(kind, ours, 5, batched=shape != "unbatched") if given else None
    expected, last = stock(x, states)
    result, ours_last = identity(ours)(x, states)
    assert type(result) is type(expected)
    if shape == "packed":
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            assert torch.equal(getattr(result, name), getattr(expected, name))
        result, expected = result.data, expected.data
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    assert type(ours_last) is type(last)
    for a, b in zip(tuple_of(ours_last), tuple_of(last), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@KINDS
@SHAPES
def test_without_normalisation_gradients_are_torchs(kind, shape):
    stock, ours = pair(kind, num_layers=2, bidirectional=True)
    x = input_of(shape, False)
    data = x.data if shape == "packed" else x
    results = []
    for layer in (stock, identity(ours)):
        leaf = data.clone().requires_grad_()
        given = PackedSequence(leaf, *x[1:]) if shape == "packed" else leaf
        output, last = layer(given)
        output = output.data if shape == "packed" else output
        loss = output.square().sum() + sum(state.pow(3).sum() for state in tuple_of(last))
        parameters = {n: p for n, p in layer.named_parameters() if "norm" not in n}
        results.append(
            {"x": torch.autograd.grad(loss, leaf, retain_graph=True)[0]}
            | dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        )
    expected, actual = results
    for name, gradient in actual.items():
        wanted = expected[name.replace("bias_hn", "bias_hh")]
        torch.testing.assert_close(gradient, wanted[-len(gradient) :] if "hn" in name else wanted, rtol=1e-8, atol=1e-8)


@KINDS
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@GIVEN
def test_cells_without_normalisation_are_torchs(kind, batched, bias, given):
    stock, ours = (cells[kind](3, 4, bias, dtype=torch.float64) for cells in (STOCK_CELLS, CELLS))
    report = ours.load_state_dict(stock.state_dict(), strict=False)
    assert not report.unexpected_keys
    x = torch.randn([5, 3] if batched else [3], dtype=torch.float64)
    states = tuple(torch.randn([5, 4] if batched else [4], dtype=torch.float64) for _ in range(STATES[kind]))
    states = (states if kind == "LSTM" else states[0]) if given else None
    expected, result = stock(x, states), identity(ours)(x, states, step=2)
    assert type(result) is type(expected)
    for a, b in zip(tuple_of(result), tuple_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@KINDS
@SETTINGS
@SHAPES
def test_shapes_with_normalisation(kind, setting, shape):
    stock, ours = (layers[kind](3, 24, **setting) for layers in (STOCK, LAYERS))
    x = input_of(shape, setting["batch_first"], torch.float32)
    (expected, last), (result, ours_last) = stock(x), ours(x)
    expected, result = (y.data if shape == "packed" else y for y in (expected, result))
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert [s.shape for s in tuple_of(ours_last)] == [s.shape for s in tuple_of(last)]


@KINDS
def test_positional_arguments_are_torchs(kind):
    names = list(inspect.signature(nn.modules.rnn.RNNBase.__init__).parameters)[2:]
    ours = inspect.signature(LAYERS[kind].__init__).parameters
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:] == names
    assert list(inspect.signature(STOCK[kind](2, 3).forward).parameters) == ["input", "hx"]
    assert list(inspect.signature(LAYERS[kind](2, 3).forward).parameters) == ["input", "hx"]


@KINDS
def test_names_and_shapes_of_parameters(kind):
    stock, ours = (layers[kind](3, 4, 2, bidirectional=True) for layers in (STOCK, LAYERS))
    torchs = {n: p.shape for n, p in stock.named_parameters()}
    own = {n: p.shape for n, p in ours.named_parameters() if not n.startswith("norm_")}
    second = {n.replace("bias_hh", "bias_hn") for n in torchs if n.startswith("bias_hh")}
    assert own.keys() == {n for n in torchs if "bias_hh" not in n} | (second if kind == "GRU" else set())
    assert all(torchs[n] == shape for n, shape in own.items() if "hn" not in n)
    gates = 16 if kind == "LSTM" else 12
    norms = {"ih": gates, "hh": gates} | ({"c": 4} if kind == "LSTM" else {})
    wanted = {}
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        for name, features in norms.items():
            key = f"norm_{name}{suffix}."
            wanted |= {key + "weight": (features,), key + "num_batches_tracked": (100,)}
            wanted |= {key + "running_mean": (100, features), key + "running_var": (100, features)}
            if name == "c":
                wanted[key + "bias"] = (features,)
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items() if k.startswith("norm_")} == wanted


@KINDS
def test_how_parameters_begin(kind):
    layer = LAYERS[kind](3, 16, 2, gamma=0.25)
    for name, parameter in layer.named_parameters():
        if not name.startswith("norm_"):
            assert 0.15 < parameter.abs().max() <= 0.25
        elif name.endswith("weight"):
            assert torch.all(parameter == 0.25)
        else:
            assert torch.all(parameter == 0)
    assert LAYERS[kind](3, 4).norm_ih_l0.weight[0] == torch.tensor(0.1)


@KINDS
def test_torchs_weights_inside_a_model(kind):
    """The biases are merged under a prefix too, and a state of our own is loaded strictly."""
    stock = nn.Sequential(nn.Identity(), STOCK[kind](3, 4))
    ours = nn.Sequential(nn.Identity(), LAYERS[kind](3, 4))
    ours.load_state_dict(stock.state_dict(), strict=False)
    merged = stock[1].bias_ih_l0 + stock[1].bias_hh_l0
    kept = slice(None) if kind == "LSTM" else slice(8)
    assert torch.equal(ours[1].bias_ih_l0[kept], merged[kept])
    twin = nn.Sequential(nn.Identity(), LAYERS[kind](3, 4))
    twin.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), ours.state_dict().values(), strict=True))


@KINDS
def test_biases_without_a_place_are_reported(kind):
    report = LAYERS[kind](3, 4, bias=False).load_state_dict(STOCK[kind](3, 4).state_dict(), strict=False)
    assert set(report.unexpected_keys) == {"bias_ih_l0", "bias_hh_l0"}


@KINDS
def test_dropout_stands_between_layers(kind):
    layer = LAYERS[kind](3, 64, 2, dropout=0.5)
    seen = []
    walk = layer._walk

    def spy(suffix, data, *rest):
        seen.append(data)
        return walk(suffix, data, *rest)

    layer._walk = spy
    output, _ = layer(torch.randn(4, 8, 3))
    assert 0.3 < (seen[1] == 0).double().mean() < 0.7
    assert not (output == 0).any()
    layer.eval()(torch.randn(4, 8, 3))
    assert not (seen[3] == 0).any()
    with pytest.warns(bn.BatchNormWarning, match="dropout=0.5 does nothing with num_layers=1"):
        LAYERS[kind](3, 4, dropout=0.5)


@KINDS
def test_repr_is_torchs(kind):
    setting = {"num_layers": 2, "bias": False, "batch_first": True, "dropout": 0.5, "bidirectional": True}
    for arguments in ({}, setting):
        assert LAYERS[kind](3, 4, **arguments).extra_repr() == STOCK[kind](3, 4, **arguments).extra_repr()
    for arguments in ({}, {"bias": False}):
        assert CELLS[kind](3, 4, **arguments).extra_repr() == STOCK_CELLS[kind](3, 4, **arguments).extra_repr()
