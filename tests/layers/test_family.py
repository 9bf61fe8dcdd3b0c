"""``make_norm``: the classes behind the names, callables in place of names, what cannot be right, and the table."""

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from family_cases import NAMES, Net, images
from torch import nn

import batchnorm as bn
from batchnorm import reference
from batchnorm.layers import channel_norms
from batchnorm.layers.family import BRICKS, Brick, table
from batchnorm.layers.group_counts import safe_groups

EVERY = pytest.mark.parametrize("name", NAMES)


# ---- The classes behind the names --------------------------------------------------------------------------


def test_torchs_own_class_where_torch_has_it():
    expected = {
        ("group", 2): nn.GroupNorm, ("layer", 2): nn.GroupNorm, ("layer", 0): nn.LayerNorm, ("rms", 0): nn.RMSNorm,
        ("instance", 1): nn.InstanceNorm1d, ("none", 2): nn.Identity,
    }  # fmt: skip
    for (name, dims), cls in expected.items():
        assert type(bn.make_norm(name, 8, dims)) is cls
        assert type(bn.make_norm(name, 8, dims, activation=None, negative_slope=0.1)) is cls
    for name, dims, cls in (
        ("group", 2, nn.GroupNorm),
        ("instance", 2, nn.InstanceNorm2d),
        ("instance", 3, nn.InstanceNorm3d),
    ):
        assert isinstance(bn.make_norm(name, 8, dims), cls)
        assert isinstance(bn.make_norm(name, 8, dims, activation="relu"), cls)
    assert [type(bn.make_norm("batch", 8, d)) for d in (0, 1, 2, 3)] == [
        bn.BatchNorm1d, bn.BatchNorm1d, bn.BatchNorm2d, bn.BatchNorm3d,
    ]  # fmt: skip
    assert bn.make_norm("instance", 8).affine
    assert bn.make_norm("instance", 8, affine=False).weight is None
    assert bn.make_norm("instance", 8, None).affine


def test_options_reach_the_layer():
    assert bn.make_norm("batch", 8, momentum=0.3, eps=0.5, statistics="batch").momentum == 0.3
    assert bn.make_norm("layer", 8, 0, affine=False).elementwise_affine is False
    assert bn.make_norm("rms", 8, 0, affine=False).weight is None
    assert bn.make_norm("rms", 8, 0).eps == bn.make_norm("rms", 8, 2).eps == 1e-5
    assert bn.make_norm("none", 8, affine=True).weight.shape == (8,)
    assert bn.make_norm("dyt", 8, alpha_start=0.8).alpha.item() == pytest.approx(0.8)
    assert bn.make_norm("filter-response", 8).learned_eps is None
    assert bn.make_norm("filter-response", 8, 0).learned_eps is not None
    assert bn.make_norm("filter-response", 8, None).learned_eps is not None
    assert type(bn.make_norm("FILTER_response", 8)) is bn.FilterResponseNorm


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (32, 16), (48, 24), (128, 32), (6, 3), (37, 1), (1, 1)])
def test_group_counts_are_safe(channels, groups):
    assert safe_groups(channels) == groups
    layer = bn.make_norm("group", channels)
    assert layer.num_groups == groups
    if channels > 1:  # one position is not the end of the signal
        x = torch.randn(2, channels, 1, 1)
        assert layer(x).abs().max() > 0.1


def test_without_positions_a_group_keeps_more_than_signs():
    layer = bn.make_norm("group", 64, 0)
    assert layer.num_groups == 16
    assert len(layer(torch.randn(4, 64)).detach().abs().unique()) > 64  # two values are always -1 and 1


def test_groups_by_hand():
    assert bn.make_norm("group", 12, groups=4).num_groups == 4
    assert bn.make_norm("group", 12, groups=12).num_groups == 12
    for groups in (5, 0, -1, 24, 2.0):
        with pytest.raises(bn.BatchNormError, match=r"12 channels do not fall into .* groups; use a divisor of 12"):
            bn.make_norm("group", 12, groups=groups)
    with pytest.raises(bn.BatchNormError, match="one value each"):
        bn.make_norm("group", 12, 0, groups=12)
    for name in ("group", "layer"):
        with pytest.raises(bn.BatchNormError, match='use "batch" or "none"'):
            bn.make_norm(name, 1, 0)


# ---- A callable in place of a name -------------------------------------------------------------------------


def test_callables():
    assert bn.make_norm(nn.BatchNorm2d, 8, momentum=0.3).momentum == 0.3
    assert bn.make_norm(partial(nn.GroupNorm, 4), 8).num_groups == 4
    ours = bn.make_norm(bn.BatchNorm2d, 8, activation="relu")
    assert type(ours) is bn.BatchNorm2d
    assert ours.activation == "relu"
    assert type(bn.make_norm(nn.BatchNorm2d, 8, activation=None)) is nn.BatchNorm2d
    wrapped = bn.make_norm(partial(nn.GroupNorm, 4), 8, activation="leaky_relu", negative_slope=0.5)
    x = torch.randn(3, 8, 2, 2)
    torch.testing.assert_close(wrapped(x, residual=x), F.leaky_relu(nn.GroupNorm(4, 8)(x) + x, 0.5))
    assert list(wrapped.state_dict()) == ["norm.weight", "norm.bias"]
    net = Net(nn.BatchNorm2d)
    assert net(images()[0]).shape == (24, 3)


def test_bad_callables():
    with pytest.raises(bn.BatchNormError, match="the callable gave a int; give one that returns"):
        bn.make_norm(lambda channels: channels, 8)
    with pytest.raises(bn.BatchNormError, match="BatchNorm2d, that is made already"):
        bn.make_norm(nn.BatchNorm2d(8), 8)
    with pytest.raises(bn.BatchNormError, match="a name or a callable, got 3"):
        bn.make_norm(3, 8)


# ---- What cannot be right ----------------------------------------------------------------------------------


def test_bad_names_and_numbers():
    with pytest.raises(bn.BatchNormError, match=r"there is no norm 'grup'; did you mean 'group'\? Choose one of batch"):
        bn.make_norm("grup", 8)
    with pytest.raises(bn.BatchNormError, match="there is no norm 'zzz'; choose one of"):
        bn.make_norm("zzz", 8)
    for channels in (0, -1, 2.0, True, None):
        with pytest.raises(bn.BatchNormError, match=r"channels is .*; give a whole number"):
            bn.make_norm("group", channels)
    for dims in (4, -1, "2"):
        with pytest.raises(bn.BatchNormError, match=r"dims, the number of position axes, is .*; use 0 for \(N, C\)"):
            bn.make_norm("group", 8, dims)
    with pytest.raises(bn.BatchNormError, match="the layer before gives 4 channels, and the norm is for 8"):
        bn.make_norm("group", 8, of=nn.Conv2d(3, 4, 1))


@EVERY
def test_unknown_options(name):
    before = nn.Conv2d(8, 8, 1)
    with pytest.raises(bn.BatchNormError, match=r"make_norm\(.*no_such.*options given: no_such"):
        bn.make_norm(name, 8, of=before, no_such=1)
    assert not hasattr(before, "parametrizations")  # nothing half done
    with pytest.raises(bn.BatchNormError, match="activation"):
        bn.make_norm(name, 8, of=before, activation="gelu")
    assert not hasattr(before, "parametrizations")


def test_weight_needs_a_weight():
    with pytest.raises(bn.BatchNormError, match=r"make_norm\('weight'\): weight normalisation.* of=conv"):
        bn.make_norm("weight", 8)
    with pytest.raises(bn.BatchNormError, match="ReLU, has no weight of its own"):
        bn.make_norm("weight", 8, of=nn.ReLU())
    conv = nn.Conv2d(4, 8, 1)
    bn.make_norm("weight", 8, of=conv)
    with pytest.raises(bn.BatchNormError, match="parametrised already"):
        bn.make_norm("weight", 8, of=conv)
    with pytest.raises(bn.BatchNormError, match="grouped transposed"):
        bn.make_norm("weight", 8, of=nn.ConvTranspose2d(4, 8, 1, groups=2))


def test_bad_inputs():
    for layer in (channel_norms.RMSNorm(4), channel_norms.ChannelAffine(4), channel_norms.InstanceNorm2d(4)):
        with pytest.raises(bn.BatchNormError, match="4 channels at axis 1, got"):
            layer(torch.randn(2, 3, 5, 5))
    for layer in (channel_norms.RMSNorm(4), channel_norms.ChannelAffine(4)):
        with pytest.raises(bn.BatchNormError, match="at least 2 dimensions"):
            layer(torch.randn(4))
        with pytest.raises(bn.BatchNormError, match="float64"):
            layer(torch.randn(2, 4, dtype=torch.float64))
        with pytest.raises(bn.BatchNormError, match="int64"):
            layer(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(bn.BatchNormError, match="expected 4D input"):
        channel_norms.InstanceNorm2d(4)(torch.randn(2, 4, 5))
    with pytest.raises(bn.BatchNormError, match="num_features is 0"):
        channel_norms.RMSNorm(0)


# ---- The table ---------------------------------------------------------------------------------------------


def test_table_has_the_reference_family():
    assert list(BRICKS) == [row.name for row in table()]
    for name, scheme in reference.FAMILY.items():
        assert BRICKS[name].scheme is scheme
    assert len(BRICKS) == 14
    for row in table():
        assert isinstance(row, Brick)
        assert row.depends in ("training", "never")
        assert row.statistics
        assert row.use_when
    with pytest.raises(AttributeError):
        BRICKS["batch"].name = "other"


@EVERY
def test_rows_are_true(name):
    row, layer = BRICKS[name], bn.make_norm(name, 8, of=nn.Conv2d(8, 8, 1))
    assert tuple(key for key, _ in layer.named_parameters()) == row.parameters
    assert tuple(key for key, _ in layer.named_buffers()) == row.state
    module, _, attribute = row.home.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
