"""torch's own fusers and quantisation on networks with our layers: the function is kept, or they refuse."""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn

ao = pytest.importorskip("torch.ao.quantization")
quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
optimization = pytest.importorskip("torch.fx.experimental.optimization")

ACTIVATIONS = pytest.mark.parametrize("activation", [None, "relu", "silu"])
QUIET = pytest.mark.filterwarnings("ignore")  # torch.ao warns of its own retirement


def network(activation):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), bn.BatchNorm2d(8, activation=activation), nn.Conv2d(8, 8, 3), bn.BatchNorm2d(8), nn.ReLU()
    )
    for layer in model:
        if isinstance(layer, bn.BatchNorm2d):
            for tensor, low, high in ((layer.running_mean, -1, 1), (layer.running_var, 0.5, 2)):
                tensor.uniform_(low, high)
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.uniform_(layer.bias, -1, 1)
    return model


def example():
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(5))


@QUIET
@ACTIVATIONS
def test_fusers_of_graphs_keep_the_function(activation):
    model, x = network(activation).eval(), example()
    for fuse in (quantize_fx.fuse_fx, optimization.fuse):
        torch.testing.assert_close(fuse(model)(x), model(x), rtol=1e-4, atol=1e-5)


@QUIET
@ACTIVATIONS
def test_fuse_modules_refuses(activation):
    with pytest.raises(AssertionError, match=r"batchnorm\.layers\.batch\.BatchNorm2d"):
        ao.fuse_modules(network(activation).eval(), [["0", "1"]])


@QUIET
@ACTIVATIONS
def test_prepared_for_training_it_computes_the_same_until_numbers_are_rounded(activation):
    model, x = network(activation).train(), example()
    prepared = quantize_fx.prepare_qat_fx(copy.deepcopy(model), ao.get_default_qat_qconfig_mapping(), (x,))
    prepared.apply(ao.disable_fake_quant)
    torch.testing.assert_close(prepared(x), model(x))
    moved, expected = (dict(m.named_buffers())["1.running_mean"] for m in (prepared, model))
    torch.testing.assert_close(moved, expected)


@QUIET
@ACTIVATIONS
@pytest.mark.parametrize("fold", [False, True])
def test_quantised_after_training_it_is_as_near_as_eight_bits_are(fold, activation):
    model, x = network(activation).eval(), example()
    expected = model(x)
    start = bn.fold(model, x)[0] if fold else model
    prepared = quantize_fx.prepare_fx(copy.deepcopy(start), ao.get_default_qconfig_mapping(), (x,))
    prepared(x)
    quantised = quantize_fx.convert_fx(prepared)
    error = (quantised(x) - expected).square().mean() / expected.square().mean()
    assert 0 < error < 0.01
