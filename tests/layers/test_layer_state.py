"""State dictionaries in both directions, copies, pickles and changes of dtype."""

import copy
import io
import pickle

import pytest
import torch
from layer_cases import OURS, STOCK, example, pair, randomise, same_buffers, same_steps
from torch import nn

import batchnorm as bn

DIMS = pytest.mark.parametrize("dims", [1, 2, 3])
ARGUMENTS = pytest.mark.parametrize(
    "arguments",
    [{}, {"affine": False}, {"bias": False}, {"track_running_stats": False}, {"momentum": None}],
    ids=["default", "no_affine", "no_bias", "no_tracking", "cumulative"],
)


def as_saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal_states(a, b):
    assert list(a.state_dict()) == list(b.state_dict())
    for name, tensor in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name], tensor, rtol=0, atol=0)


@DIMS
@ARGUMENTS
def test_state_dict_both_directions_through_a_file(dims, arguments):
    stock = randomise(STOCK[dims](5, **arguments))
    ours = OURS[dims](5, **arguments, activation="relu", statistics="batch", update=False, nonfinite="raise")
    ours.load_state_dict(as_saved(stock.state_dict()), strict=True)
    assert_equal_states(stock, ours)
    back = STOCK[dims](5, **arguments)
    back.load_state_dict(as_saved(randomise(ours).state_dict()), strict=True)
    assert_equal_states(ours, back)
    assert ours.state_dict()._metadata == stock.state_dict()._metadata


@DIMS
def test_strict_loading_still_refuses(dims):
    state = STOCK[dims](5, affine=False).state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        OURS[dims](5).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        OURS[dims](6).load_state_dict(STOCK[dims](5).state_dict())


@DIMS
def test_state_of_version_1_has_no_counter(dims):
    state = randomise(STOCK[dims](5)).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    layer = OURS[dims](5)
    layer.load_state_dict(state, strict=True)
    assert int(layer.num_batches_tracked) == 0
    torch.testing.assert_close(layer.running_mean, state["running_mean"])
    del state._metadata
    layer.load_state_dict(state, strict=True)


@DIMS
def test_assign_takes_the_tensors_themselves(dims, path):
    stock, _ = pair(dims)
    with torch.device("meta"):
        ours = OURS[dims](24)
    state = stock.state_dict()
    ours.load_state_dict(state, strict=True, assign=True)
    assert ours.running_mean is state["running_mean"]
    assert isinstance(ours.weight, nn.Parameter)
    x = example(dims)
    ours(x)
    assert torch.equal(stock.running_mean, ours.running_mean)  # one tensor, moved once
    same_steps(stock.eval(), ours.eval(), x, torch.randn_like(x))


@DIMS
def test_pickle_of_the_module_keeps_the_additions(dims, path):
    layer = randomise(OURS[dims](24, activation="leaky_relu", negative_slope=0.3, update=False, nonfinite="raise"))
    again = pickle.loads(pickle.dumps(layer))
    assert repr(again) == repr(layer)
    assert_equal_states(layer, again)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = example(dims)
    torch.testing.assert_close(again(x), layer(x), rtol=0, atol=0)


@DIMS
def test_deepcopy_in_mid_training_goes_its_own_way(dims, path):
    layer = OURS[dims](24, activation="relu")
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = example(dims)

    def learn(layer, optimiser):
        optimiser.zero_grad()
        layer(x).square().sum().backward()
        optimiser.step()

    learn(layer, optimiser)
    twin = copy.deepcopy(layer)
    frozen = copy.deepcopy(layer.state_dict())
    twin_optimiser = torch.optim.SGD(twin.parameters(), lr=0.1)
    learn(twin, twin_optimiser)
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, frozen[name], rtol=0, atol=0)
    assert int(twin.num_batches_tracked) == 2
    learn(layer, optimiser)
    assert_equal_states(layer, twin)


@DIMS
@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_converted_layers_compute_as_torchs(dims, convert, mode, path):
    stock, ours = pair(dims)
    for layer in (stock, ours):
        getattr(layer.train(mode), convert)()
    assert ours.weight.dtype == ours.running_mean.dtype == stock.weight.dtype
    assert ours.num_batches_tracked.dtype == torch.int64
    x = example(dims, ours.weight.dtype)
    same_steps(stock, ours, x, torch.randn_like(x))


@DIMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_narrow_inputs_with_float32_parameters(dims, dtype, mode, path):
    stock, ours = pair(dims)
    x = example(dims, dtype)
    same_steps(stock.train(mode), ours.train(mode), x, torch.randn_like(x))


def test_to_moves_everything():
    layer = bn.BatchNorm2d(5).to(dtype=torch.float64, device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.weight.unique().tolist() == [1.0]


@DIMS
def test_a_model_of_stock_layers_loads_a_model_of_ours(dims, path):
    def model(cls):
        return nn.Sequential(nn.Identity(), cls(24), nn.ModuleDict({"inner": cls(24)})["inner"])

    theirs, mine = model(STOCK[dims]), model(OURS[dims])
    x = example(dims)
    mine(x)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    same_buffers(mine, theirs)
    torch.testing.assert_close(theirs.eval()(x), mine.eval()(x), rtol=1e-4, atol=1e-5)


@DIMS
@pytest.mark.parametrize("frozen", [False, True], ids=["eval", "no update"])
def test_without_the_counter_nothing_that_does_not_count_fails(dims, frozen, path):
    layer, x = randomise(OURS[dims](24)), example(dims)
    layer.update = False if frozen else None
    layer.train(frozen)
    expected = layer(x)
    del layer.num_batches_tracked
    assert torch.equal(layer(x), expected)


def test_what_a_class_or_an_instance_says_goes_before_what_is_registered(path):
    class Doubled(bn.BatchNorm2d):
        weight = property(lambda self: self._parameters["weight"] * 2)

    layer, x = randomise(bn.BatchNorm2d(24)).eval(), torch.randn(4, 24, 5, 5)
    plain = layer(x) - layer.bias.view(1, -1, 1, 1)
    layer.__class__ = Doubled
    torch.testing.assert_close(layer(x) - layer.bias.view(1, -1, 1, 1), 2 * plain, rtol=1e-4, atol=1e-5)
    layer.__class__ = bn.BatchNorm2d
    layer.__dict__["weight"] = 3 * layer._parameters["weight"].detach()
    torch.testing.assert_close(layer(x) - layer.bias.view(1, -1, 1, 1), 3 * plain, rtol=1e-4, atol=1e-5)
