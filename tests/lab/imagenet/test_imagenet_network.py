"""The network against Figure 5 of arXiv 1502.03167, typed here as it is printed, and against torch's layers."""

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.errors import BatchNormError
from batchnorm.lab.networks.bn_inception import TABLE, BNInception, PerActivation, sync_norm, torch_norm

# Name, printed output (side, maps), 1x1, 3x3 reduce, 3x3, double reduce, double, projection (0: pass through).
PRINTED = [
    ("3a", 28, 256, 64, 64, 64, 64, 96, 32),
    ("3b", 28, 320, 64, 64, 96, 64, 96, 64),
    ("3c", 28, 576, 0, 128, 160, 64, 96, 0),
    ("4a", 14, 576, 224, 64, 96, 96, 128, 128),
    ("4b", 14, 576, 192, 96, 128, 96, 128, 128),
    ("4c", 14, 576, 160, 128, 160, 128, 160, 128),
    ("4d", 14, 576, 96, 128, 192, 160, 192, 128),
    ("4e", 14, 1024, 0, 128, 192, 192, 256, 0),
    ("5a", 7, 1024, 352, 192, 320, 160, 224, 128),
    ("5b", 7, 1024, 352, 192, 320, 192, 224, 128),
]
START = {"convolution": (112, 64), "max pool": (56, 64), "convolution 2": (56, 192), "max pool 2": (28, 192)}


def outputs(model, size=224):
    found, x = {}, torch.zeros(1, 3, size, size)
    with torch.no_grad():
        for name, stage in model.eval().stages().items():
            x = stage(x)
            found[name] = x.shape[2], x.shape[1]
    return found


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def counted(projections):
    """The weights of all convolutions, and how many maps they make, from the printed table."""
    weights = [(3 * 8) * 49, 24 * 64, 64 * 64, 64 * 192 * 9]
    maps = [64, 64, 192]
    inputs = 192
    for (_, _, _, one, three_in, three, double_in, double, _), projection in zip(PRINTED, projections, strict=True):
        weights += [inputs * one, inputs * three_in, 9 * three_in * three]
        weights += [inputs * double_in, 9 * double_in * double, 9 * double * double, inputs * projection]
        maps += [one, three_in, three, double_in, double, double, projection]
        inputs = one + three + double + (projection or inputs)
    return sum(weights), sum(maps), inputs


def test_rows_are_those_of_the_paper_but_for_two_projections():
    for row, (name, _, _, one, three_in, three, double_in, double, projection) in zip(TABLE, PRINTED, strict=True):
        assert (row.name, row.one, row.three, row.double) == (name, one, (three_in, three), (double_in, double))
        assert row.projection == (96 if name in ("4c", "4d") else projection)
        assert row.pool == ("max" if name in ("3c", "4e", "5b") else "avg")
        assert row.stride == (2 if name in ("3c", "4e") else 1)


def test_outputs_are_those_of_the_paper():
    found = outputs(BNInception())
    printed = {f"inception ({row[0]})": row[1:3] for row in PRINTED}
    printed["inception (3c)"], printed["inception (4e)"] = (14, 576), (7, 1024)  # printed before their stride of 2
    assert found == {**START, **printed, "avg pool": (1, 1024)}


def test_the_printed_filters_make_other_outputs_than_printed():
    found = outputs(BNInception(projection=128))
    assert [found[f"inception ({name})"][1] for name in ("4c", "4d", "4e")] == [608, 608, 1056]


@pytest.mark.parametrize("projection", [96, 128])
def test_parameters_are_those_of_the_table(projection):
    model = BNInception(projection=projection)
    weights, maps, features = counted([projection if row[0] in ("4c", "4d") else row[-1] for row in PRINTED])
    assert parameters(model) == weights + 2 * maps + 1000 * features + 1000
    plain = BNInception(None, projection=projection)
    assert parameters(plain) == weights + maps + 1000 * features + 1000


def test_with_and_without_the_classifiers():
    model, sided = BNInception(), BNInception(side=True)
    assert parameters(model) == 11_188_288
    assert parameters(model) - parameters(model.classifier) == 10_163_288
    assert parameters(sided) == 13_605_672  # the paper: 13.6 million
    assert round(parameters(BNInception(None, side=True)) / 1e6, 1) == 13.6


def test_normalisation_stands_before_every_nonlinearity_and_takes_the_place_of_biases():
    model, plain = BNInception(width=1 / 16), BNInception(None, width=1 / 16)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(each.bias is None for each in convolutions)
    norms = [module for module in model.modules() if isinstance(module, bn.BatchNorm2d)]
    assert len(norms) == len(convolutions) - 1  # the depthwise part has neither norm nor nonlinearity
    assert {norm.activation for norm in norms} == {"relu"}
    kept = [each for each in plain.modules() if isinstance(each, nn.Conv2d) and each.bias is not None]
    assert len(kept) == len(norms) == sum(isinstance(module, nn.ReLU) for module in plain.modules())


def test_it_computes_what_torchs_layers_compute():
    torch.manual_seed(0)
    ours, stock = (BNInception(norm, width=1 / 16, classes=7).double() for norm in (sync_norm, torch_norm))
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        with torch.no_grad():
            b.copy_(a.add_(0.1 * torch.randn_like(a)))
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    losses = [model(x).square().sum() for model in (ours, stock)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-8, rtol=1e-6)
    for a, b in zip(ours.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "arguments", [{"side": True}, {"per_activation": True}, {"norm": None, "local_response": True}]
)
def test_every_parameter_learns(arguments):
    model = BNInception(**{"width": 1 / 16, "classes": 5, "size": 64, **arguments})
    found = model(torch.randn(4, 3, 64, 64))
    scores = found if isinstance(found, tuple) else (found,)
    assert [each.shape for each in scores] == [(4, 5)] * (2 if "side" in arguments else 1)
    sum(each.square().sum() for each in scores).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert isinstance(model.eval()(torch.zeros(1, 3, 64, 64)), torch.Tensor)


def test_per_activation_takes_its_statistics_over_the_batch_alone():
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    layer = PerActivation(3, 2, "sigmoid").double()
    expected = torch.sigmoid((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt())
    torch.testing.assert_close(layer(x), expected)
    model = BNInception(width=1 / 16, per_activation=True)
    named = {name.split(".")[0] for name, module in model.named_modules() if isinstance(module, PerActivation)}
    assert named == {"inception5b"}


def test_weights_come_from_the_seed_and_initial_scales_them():
    first, again, other, wide = (
        BNInception(width=1 / 8, seed=seed, initial=initial).state_dict()
        for seed, initial in ((1, 1.0), (1, 1.0), (2, 1.0), (1, 2.0))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "inception4a.conv3x3.1.0.weight"
    assert not torch.equal(first[name], other[name])
    torch.testing.assert_close(wide[name], 2 * first[name])
    assert first[name].std() == pytest.approx((2 / first[name][0].numel()) ** 0.5, rel=0.1)


def test_arguments_that_make_no_sense():
    with pytest.raises(BatchNormError, match="no activation 'tanh'"):
        BNInception(activation="tanh")
    with pytest.raises(BatchNormError, match="multiple of 32"):
        BNInception(size=100, per_activation=True)
    with pytest.raises(BatchNormError, match="give a norm"):
        BNInception(None, per_activation=True)
