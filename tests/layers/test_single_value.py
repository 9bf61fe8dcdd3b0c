"""``one_value="running"``: a training batch with one value per channel is normalised by the running statistics."""

import copy
import pickle

import pytest
import torch
from layer_cases import OURS, randomise, same, step
from torch import nn

import batchnorm as bn

ONE = {1: (1, 24), 2: (1, 24, 1, 1), 3: (1, 24, 1, 1, 1)}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_output_and_gradients_are_those_of_evaluation(dims, path):
    layer = randomise(OURS[dims](24, activation="silu", one_value="running"))
    stock = copy.deepcopy(layer).eval()
    x, dy = torch.randn(ONE[dims]), torch.randn(ONE[dims])
    before = copy.deepcopy(dict(layer.named_buffers()))
    expected = step(stock, x, dy, list(stock.parameters()))
    actual = step(layer, x, dy, list(layer.parameters()))
    for a, e in zip(actual, expected, strict=True):
        same(a, e)
    assert actual[1].abs().sum() > 0
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])


def test_two_values_are_a_batch(path):
    layer = bn.BatchNorm1d(24, one_value="running")
    stock = nn.BatchNorm1d(24)
    x = torch.randn(2, 24)
    same(layer(x), stock(x))
    same(layer.running_var, stock.running_var)
    assert int(layer.num_batches_tracked) == 1
    image = bn.BatchNorm2d(24, one_value="running")
    image(torch.randn(1, 24, 1, 2))  # one example, but two values
    assert int(image.num_batches_tracked) == 1


@pytest.mark.parametrize("switches", [{"statistics": "batch"}, {"statistics": "running", "update": True}], ids=str)
def test_with_other_switches(switches, path):
    layer = randomise(bn.BatchNorm1d(24, one_value="running", **switches))
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(1, 24)
    same(layer(x), copy.deepcopy(layer).eval().requires_grad_(False)(x))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_default_raises_as_torch_does(path):
    layer = bn.BatchNorm1d(24)
    assert layer.one_value == "raise"
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 24))


def test_without_running_statistics_there_is_no_way_out(path):
    layer = bn.BatchNorm1d(24, one_value="running", track_running_stats=False)
    with pytest.raises(bn.BatchNormError, match="more than 1 value per channel"):
        layer(torch.randn(1, 24))


def test_bad_choice():
    with pytest.raises(bn.BatchNormError, match=r"BatchNorm2d: one_value is 'skip'; use one of 'raise', 'running'"):
        bn.BatchNorm2d(3, one_value="skip")


def test_repr_pickle_and_layers_of_an_older_version():
    layer = bn.BatchNorm1d(3, one_value="running")
    assert "one_value='running'" in repr(layer)
    assert "one_value" not in repr(bn.BatchNorm1d(3))
    assert pickle.loads(pickle.dumps(layer)).one_value == "running"
    old = bn.BatchNorm1d(3)
    del old.__dict__["one_value"]  # as in a pickle from before the keyword
    old = pickle.loads(pickle.dumps(old))
    assert old.one_value == "raise"
    assert old(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("batch", [1, 4])
def test_compiled(batch):
    torch._dynamo.reset()
    layer = randomise(bn.BatchNorm1d(24, one_value="running"))
    twin = copy.deepcopy(layer)
    x = torch.randn(batch, 24)
    same(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), twin(x))
    same(layer.running_mean, twin.running_mean)
    torch._dynamo.reset()


@pytest.mark.parametrize("lengths", [[1, 0], [0, 0]], ids=str)
def test_a_mask_that_leaves_one_value_or_none(lengths, path):
    layer = randomise(bn.BatchNorm1d(24, one_value="running"))
    before = copy.deepcopy(layer.state_dict())
    x, mask = torch.randn(2, 24, 3), torch.tensor(lengths)
    same(layer(x, mask=mask), copy.deepcopy(layer).eval()(x, mask=mask))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])
    layer(x, mask=torch.tensor([1, 1]))
    assert int(layer.num_batches_tracked) == 1
