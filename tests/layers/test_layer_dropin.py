"""The classes stand where torch's stand: same arguments, same attributes, same words."""

import inspect
import itertools
import subprocess
import sys

import pytest
import torch
from layer_cases import OURS, SHAPES, STOCK, example, pair, same_steps
from torch import nn
from torch.nn.utils import parametrize

import batchnorm as bn
from batchnorm.errors import BatchNormError

DIMS = pytest.mark.parametrize("dims", [1, 2, 3])
# Every combination of what torch's constructor takes, besides the number of features.
COMBINATIONS = [
    dict(zip(("eps", "momentum", "affine", "track_running_stats", "bias", "dtype"), values, strict=True))
    for values in itertools.product(
        (1e-5, 1e-3), (0.1, None), (True, False), (True, False), (True, False), (None, torch.float64)
    )
]


@DIMS
def test_constructor_takes_torchs_arguments_in_torchs_order(dims):
    theirs = inspect.signature(STOCK[dims]).parameters
    ours = inspect.signature(OURS[dims]).parameters
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for name in positional:
        assert ours[name].default == theirs[name].default
    added = {name for name in ours if name not in theirs}
    assert added == {"activation", "negative_slope", "statistics", "update", "nonfinite", "one_value", "of_torch"}
    assert all(ours[name].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for name in added)


@DIMS
@pytest.mark.parametrize("arguments", COMBINATIONS, ids=lambda a: "-".join(map(str, a.values())))
def test_every_combination_of_arguments_makes_the_same_layer(dims, arguments):
    stock, ours = STOCK[dims](7, **arguments), OURS[dims](7, **arguments)
    assert ours.extra_repr() == stock.extra_repr()
    assert repr(ours) == repr(stock)
    for kind in ("_parameters", "_buffers"):
        theirs, mine = getattr(stock, kind), getattr(ours, kind)
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            assert (mine[name] is None) == (tensor is None)
            if tensor is not None:
                torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0)
                assert mine[name].requires_grad == tensor.requires_grad


@DIMS
def test_positional_arguments(dims):
    layer = OURS[dims](5, 1e-3, None, False, False, "meta", torch.bfloat16)
    assert (layer.num_features, layer.eps, layer.momentum, layer.affine) == (5, 1e-3, None, False)
    assert layer.track_running_stats is False
    assert OURS[dims](5, 1e-3, 0.1, True, True, "meta", torch.bfloat16).weight.dtype == torch.bfloat16
    assert OURS[dims](5, device="meta").running_mean.is_meta
    with pytest.raises(TypeError):
        OURS[dims](5, 1e-3, 0.1, True, True, None, None, "relu")
    with pytest.raises(TypeError, match="activaton"):
        OURS[dims](5, activaton="relu")


@DIMS
def test_isinstance_and_hierarchy(dims):
    layer = OURS[dims](3)
    assert isinstance(layer, STOCK[dims])
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    for other in STOCK.values():
        assert isinstance(layer, other) == (other is STOCK[dims])


def test_repr_shows_additions_only_where_they_differ():
    layer = bn.BatchNorm2d(3, activation="leaky_relu", negative_slope=0.2, statistics="running", update=False)
    layer.nonfinite = "raise"
    assert layer.extra_repr() == nn.BatchNorm2d(3).extra_repr() + (
        ", activation='leaky_relu', negative_slope=0.2, statistics='running', update=False, nonfinite='raise'"
    )
    assert repr(bn.BatchNorm2d(3, activation="silu")).endswith("track_running_stats=True, activation='silu')")


@DIMS
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_exchanging_the_class_of_a_stock_layer(dims, mode, path):
    stock, _ = pair(dims)
    exchanged, _ = pair(dims)
    exchanged.load_state_dict(stock.state_dict())
    exchanged.__class__ = OURS[dims]
    x = example(dims)
    same_steps(stock.train(mode), exchanged.train(mode), x, torch.randn_like(x))
    assert repr(exchanged) == repr(stock)
    exchanged.activation = "relu"
    assert exchanged(x).min() == 0


@DIMS
def test_native_kernel_is_what_runs(dims, kernel_calls):
    layer, x = OURS[dims](SHAPES[dims][1]), example(dims).requires_grad_()
    layer(x).sum().backward()
    assert len(kernel_calls) == 2
    layer.eval()(x).sum().backward()
    assert len(kernel_calls) == 4


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convert_sync_batchnorm_accepts_our_layers(activation):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), bn.BatchNorm2d(4, eps=1e-3, momentum=None, activation=activation))
    model[1].running_mean.fill_(3.0)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[1]) is nn.SyncBatchNorm
    assert (converted[1].eps, converted[1].momentum) == (1e-3, None)
    assert converted[1].running_mean.tolist() == [3.0] * 4


@DIMS
def test_reset_parameters_and_running_stats(dims, path):
    layer = OURS[dims](24)
    layer(example(dims))
    torch.nn.init.constant_(layer.weight, 3.0)
    assert int(layer.num_batches_tracked) == 1
    layer.reset_running_stats()
    assert (layer.running_mean.unique().tolist(), layer.running_var.unique().tolist()) == ([0.0], [1.0])
    assert int(layer.num_batches_tracked) == 0
    layer.reset_parameters()
    assert layer.weight.unique().tolist() == [1.0]


def test_fuse_conv_bn_eval_reads_our_layer(path):
    conv, layer = nn.Conv2d(3, 24, 3), pair(2)[1]
    x = torch.randn(2, 3, 8, 8)
    fused = nn.utils.fuse_conv_bn_eval(conv.eval(), layer.eval())
    torch.testing.assert_close(fused(x), layer(conv(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fuse_conv_bn_eval", "fuse_linear_bn_eval"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "silu"])
def test_torchs_fusers_do_not_drop_an_activation(activation, name):
    dims = 2 if "conv" in name else 1
    before = nn.Conv2d(3, 24, 3) if dims == 2 else nn.Linear(3, 24)
    layer = OURS[dims](24, activation=activation)
    with pytest.raises(BatchNormError, match=f"{name}: BatchNorm{dims}d applies {activation} .* use bn.fold"):
        getattr(nn.utils.fusion, name)(before.eval(), layer.eval())


IMPORTED_FIRST = """
import inspect, sys
{imports}
fuse, signature = {fuse}, inspect.signature({fuse})
layer = bn.BatchNorm2d(8, activation="relu").eval()
conv = torch.nn.Conv2d(3, 8, 3).eval()
for call in (lambda: fuse(conv, layer), lambda: fuse(conv=conv, bn=layer)):
    try:
        call()
    except bn.BatchNormError as error:
        print(error.where)
assert inspect.signature(fuse) == signature
sys.modules.pop("batchnorm.layers.torch_fusion")
import batchnorm.layers.torch_fusion as again
again.guard()
print(fuse(conv, torch.nn.BatchNorm2d(8).eval(), False), fuse(conv, bn=bn.BatchNorm2d(8).eval()))
"""


@pytest.mark.parametrize(
    ("imports", "fuse"),
    [
        ("import torch\nfrom torch.nn.utils import fuse_conv_bn_eval\nimport batchnorm as bn", "fuse_conv_bn_eval"),
        ("import torch, batchnorm as bn", "torch.nn.utils.fuse_conv_bn_eval"),
    ],
)
def test_torchs_fusers_ask_however_they_were_imported(imports, fuse):
    code = IMPORTED_FIRST.format(imports=imports, fuse=fuse)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    conv = "Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))"
    assert done.stdout.splitlines() == ["fuse_conv_bn_eval"] * 2 + [f"{conv} {conv}"], done.stderr


def test_torchs_fusers_do_not_put_running_statistics_in_the_place_of_the_batchs():
    layer = bn.BatchNorm2d(24, statistics="batch")
    with pytest.raises(BatchNormError, match="statistics of each batch, in evaluation too"):
        nn.utils.fuse_conv_bn_eval(nn.Conv2d(3, 24, 3).eval(), layer.eval())
    layer.statistics = "auto"
    nn.utils.fuse_conv_bn_eval(nn.Conv2d(3, 24, 3).eval(), layer.eval())


@DIMS
def test_parametrised_weight(dims, path):
    stock, ours = pair(dims)
    for layer in (stock, ours):
        parametrize.register_parametrization(layer, "weight", nn.Softplus())
    assert isinstance(ours, OURS[dims])
    x = example(dims)
    same_steps(stock, ours, x, torch.randn_like(x))
    assert ours.learn
    parametrize.remove_parametrizations(ours, "weight")
    assert type(ours) is OURS[dims]


@DIMS
def test_module_hooks_run(dims, path):
    layer, seen = OURS[dims](24, activation="relu"), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("pre") or (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, y: seen.append("post") or y + 1)
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append("backward"))
    x = example(dims).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert seen == ["pre", "post", "backward"]
    assert y.min() == 1
    torch.testing.assert_close(
        layer.running_mean, 0.2 * x.detach().transpose(0, 1).flatten(1).mean(1), rtol=1e-4, atol=1e-5
    )
