"""``FrozenBatchNorm``: a constant, in training too."""

import copy
import pickle

import numpy as np
import pytest
import torch
from layer_cases import LAST, OURS, SHAPES, STOCK, TOLERANCE, example, pair, randomise, same
from torch import nn

import batchnorm as bn
from batchnorm import reference

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])


def numbers(tensor):
    return tensor.detach().double().numpy()


def frozen_layer(**arguments):
    return randomise(bn.FrozenBatchNorm(24, **arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dims", "last"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
@MODES
def test_against_the_reference(dims, last, dtype, mode, path):
    layer = frozen_layer(activation="relu").train(mode)
    if dtype == torch.float64:
        layer.double()
    x, residual = example(dims, dtype, last), example(dims, dtype, last)
    before = copy.deepcopy(layer.state_dict())
    x.requires_grad_()
    y = layer(x, residual=residual)
    dy = torch.randn_like(y)
    y.backward(dy)
    common = {
        "gamma": numbers(layer.weight),
        "beta": numbers(layer.bias),
        "eps": layer.eps,
        "activation": "relu",
        "residual": numbers(residual),
        "mu": numbers(layer.running_mean),
        "var": numbers(layer.running_var),
    }
    expected = reference.batch_norm_forward(numbers(x), **common).y
    dx = reference.batch_norm_backward(numbers(dy), numbers(x), **common).dx
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(numbers(y), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    if dtype != torch.bfloat16:  # there rounding decides on which side of 0 a value lies
        np.testing.assert_allclose(numbers(x.grad), dx, rtol=tolerance, atol=tolerance * np.abs(dx).max())
    assert y.dtype == dtype
    assert not last or y.is_contiguous(memory_format=LAST[dims])
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_any_dimensions_from_two_up(path):
    layer = frozen_layer()
    for shape in [(3, 24), *SHAPES.values(), (2, 24, 2, 1, 2, 2)]:
        x = torch.randn(shape)
        same(layer(x), nn.functional.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias))
        assert layer.seen == len(shape)
    with pytest.raises(bn.BatchNormError, match="at least 2 dimensions"):
        layer(torch.randn(24))


def test_padding_is_zero(path):
    layer = frozen_layer()
    x, lengths = torch.randn(3, 24, 4), torch.tensor([4, 1, 2])
    y = layer(x, mask=lengths)
    same(y[0], layer(x)[0])
    assert torch.equal(y[1, :, 1:], torch.zeros(24, 3))


def test_one_example_is_enough(path):
    assert frozen_layer().train()(torch.randn(1, 24)).shape == (1, 24)


def test_nothing_learns():
    layer = frozen_layer().train().requires_grad_(True)
    assert list(layer.parameters()) == []
    assert not layer.learn
    layer.learn = False
    with pytest.raises(bn.BatchNormError, match=r"does not learn; make it a BatchNorm with bn.unfreeze"):
        layer.learn = True
    assert not layer(torch.randn(4, 24)).requires_grad
    model = nn.Sequential(nn.Linear(24, 24), layer)
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model(torch.randn(4, 24)).square().sum().backward()
    optimizer.step()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_state_both_ways(dims):
    stock, _ = pair(dims)
    layer = bn.FrozenBatchNorm(24)
    assert list(layer.state_dict()) != []
    assert set(layer.state_dict()) == set(stock.state_dict())
    layer.load_state_dict(stock.state_dict(), strict=True)
    x = example(dims)
    same(layer(x), stock.eval()(x))
    for cls in (STOCK[dims], OURS[dims]):
        back = cls(24)
        back.load_state_dict(layer.state_dict(), strict=True)
        same(back.eval()(x), stock(x))


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_dictionaries_without_a_count(version):
    """As torchvision and detectron2 write them, alone and inside a model; their versions count differently."""
    stock, _ = pair(2)
    bare = {k: v for k, v in stock.state_dict().items() if k != "num_batches_tracked"}
    for model, prefix in ((bn.FrozenBatchNorm(24), ""), (nn.Sequential(bn.FrozenBatchNorm(24)), "0.")):
        state = type(stock.state_dict())((prefix + k, v) for k, v in bare.items())
        if version is not None:
            state._metadata = {prefix.rstrip("."): {"version": version}, "": {"version": version}}
        assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
        assert set(state) == {prefix + k for k in bare}
        layer = model if prefix == "" else model[0]
        for name, value in bare.items():
            assert torch.equal(getattr(layer, name), value)


def test_missing_keys_are_still_missed():
    with pytest.raises(RuntimeError, match="running_mean"):
        bn.FrozenBatchNorm(24).load_state_dict({"weight": torch.ones(24), "bias": torch.ones(24)})


def test_copies_and_repr(path):
    layer = frozen_layer(activation="relu6", eps=1e-3)
    x = example(2)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again.train()(x), layer(x))
        assert list(again.parameters()) == []
    assert repr(layer) == "FrozenBatchNorm(24, eps=0.001, affine=True, activation='relu6')"
    plain = bn.FrozenBatchNorm(24, affine=False)
    assert plain.weight is None
    assert "weight" not in plain.state_dict()
    same(plain(x), nn.BatchNorm2d(24).eval()(x).detach())
    half = bn.FrozenBatchNorm(24, dtype=torch.bfloat16)
    assert half.weight.dtype == half.running_var.dtype == torch.bfloat16


def test_scale_and_shift_against_the_reference():
    layer = frozen_layer(eps=1e-3)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        layer.to(dtype)
        scale, shift = layer.scale_and_shift()
        expected = reference.inference_affine(
            numbers(layer.weight),
            numbers(layer.bias),
            numbers(layer.running_mean),
            numbers(layer.running_var),
            layer.eps,
        )
        for actual, target in zip((scale, shift), expected, strict=True):
            assert actual.dtype == dtype
            np.testing.assert_allclose(numbers(actual), target, rtol=tolerance, atol=tolerance)


class WithResidual(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, residual=x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@MODES
def test_exported_it_is_an_affine_map(dtype, mode):
    layer = frozen_layer(activation="relu")
    model = WithResidual(layer).train(mode)
    x = example(2, dtype)
    exported = torch.export.export(model, (x,), strict=True)
    used = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not any("batch_norm" in name for name in used)
    assert any("mul" in name for name in used)
    same(exported.module()(x), layer(x, residual=x))
    assert exported.module()(x).dtype == dtype
    # What is done to x itself: scale, shift, residual, activation; the rest is made of constants.
    (node,) = (n for n in exported.graph.nodes if n.op == "placeholder" and n.name == "x")
    assert sorted(str(user.target) for user in node.users) == ["aten.add.Tensor", "aten.mul.Tensor"]


@MODES
def test_compiled(mode):
    torch._dynamo.reset()
    layer = frozen_layer(activation="silu").train(mode)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = example(2)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for leaf, run in zip(leaves, (layer, compiled), strict=True):
        run(leaf).square().sum().backward()
    same(compiled(x), layer(x))
    same(leaves[1].grad, leaves[0].grad, 1e-4)
    torch._dynamo.reset()


def test_traced_by_fx_it_is_one_node():
    graph = torch.fx.symbolic_trace(nn.Sequential(frozen_layer(), nn.ReLU())).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


def test_managers_leave_no_trace(path):
    layer = frozen_layer()
    x = example(2)
    expected = layer(x)
    with bn.no_update(layer):
        same(layer(x), expected)
    with bn.use_batch_statistics(layer):
        pass
    assert (layer.statistics, layer.update) == ("running", False)
    same(layer.train()(x), expected)
