"""A switch that is set to what is none of its values fails there, on every layer, and keeps the old value."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.layers.checked import SWITCHES, Checked

LAYERS = {
    "BatchNorm1d": lambda: bn.BatchNorm1d(4),
    "BatchNorm2d": lambda: bn.BatchNorm2d(4),
    "BatchNorm3d": lambda: bn.BatchNorm3d(4),
    "FrozenBatchNorm": lambda: bn.FrozenBatchNorm(4),
    "GhostBatchNorm": lambda: bn.GhostBatchNorm(4, 2),
    "SplitBatchNorm": lambda: bn.SplitBatchNorm(4, 2),
    "MaskedBatchNorm": lambda: bn.MaskedBatchNorm(4),
    "BatchRenorm": lambda: bn.BatchRenorm(4),
    "SyncBatchNorm": lambda: bn.SyncBatchNorm(4),
    "exchanged": lambda: exchanged(),
}
WRONG = {
    "activation": ("rleu", "gelu", 1, nn.ReLU()),
    "negative_slope": ("0.1", None),
    "statistics": ("bath", None, True, np.ones(2)),
    "update": ("yes", 2, "auto"),
    "nonfinite": ("warn", None),
    "one_value": ("error", False),
    "momentum": (1.5, -0.1, float("nan"), "0.1", [0.1]),
    "eps": (-1e-5, float("nan"), None, "1e-5"),
    "learn": ("no", None, 3),
}
RIGHT = {
    "activation": (None, "none", "relu", "silu"),
    "negative_slope": (0.2, 0, np.float32(0.1)),
    "statistics": ("auto", "batch", "running"),
    "update": (None, True, False),
    "nonfinite": ("raise", "reject"),
    "one_value": ("running", "raise"),
    "momentum": (None, 0, 1, 0.5, np.float64(0.1), torch.tensor(0.1)),
    "eps": (0.0, 1e-3, np.float32(1e-5)),
    "learn": (True,),
}


def exchanged():
    layer = nn.BatchNorm2d(4)
    layer.__class__ = bn.BatchNorm2d
    return layer


def test_every_switch_is_tried():
    assert set(WRONG) == set(RIGHT) == set(SWITCHES)
    assert set(bn.BatchNorm2d.additions) <= set(SWITCHES)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", LAYERS)
def test_wrong_values(kind, name):
    layer = LAYERS[kind]()
    before = getattr(layer, name)
    for value in WRONG[name]:
        with pytest.raises(bn.BatchNormError, match=f"^{type(layer).__name__}: {name} is .*; use "):
            setattr(layer, name, value)
        assert getattr(layer, name) is before


@pytest.mark.parametrize("name", set(RIGHT) - {"learn"})
def test_right_values(name):
    for make in LAYERS.values():
        layer = make()
        for value in RIGHT[name]:
            setattr(layer, name, value)
            assert getattr(layer, name) is value


@pytest.mark.parametrize(
    ("layer", "name", "value", "advice"),
    [
        (bn.GhostBatchNorm(4, 2), "virtual_batch_size", 0, "use a whole number from 1 up"),
        (bn.GhostBatchNorm(4, 2), "virtual_batch_size", 2.5, "use a whole number from 1 up"),
        (bn.SplitBatchNorm(4, 2), "splits", True, "use a whole number from 1 up"),
        (bn.SplitBatchNorm(4, 2), "shuffle", "yes", "use one of True, False"),
        (bn.BatchRenorm(4), "rmax", 0.5, "use a number from 1 up, or a function"),
        (bn.BatchRenorm(4), "dmax", "5", "use a number from 0 up, or a function"),
        (bn.make_norm("group", 4, 2, activation="relu"), "activation", "rleu", "use one of 'none', 'relu'"),
        (bn.DyT(4), "activation", "rleu", "use one of 'none', 'relu'"),
        (bn.DomainBatchNorm(4, ["a", "b"]), "statistics", "bath", "use one of 'auto', 'batch', 'running'"),
        (bn.BatchNormLSTM(3, 4), "update", "no", "use one of None, True, False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_of_other_layers(layer, name, value, advice):
    with pytest.raises(bn.BatchNormError, match=advice):
        setattr(layer, name, value)


def test_forward_sets_nothing(monkeypatch):
    """The check is no part of a step."""
    layer, x = bn.BatchNorm2d(4, activation="relu"), torch.randn(2, 4, 3, 3)
    monkeypatch.setattr(Checked, "__setattr__", None)
    for training in (True, False):
        layer.__dict__["training"] = training
        assert layer(x).shape == x.shape


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_checked_too(copied):
    layer = copied(bn.BatchNorm2d(4, activation="relu"))
    assert layer.activation == "relu"
    with pytest.raises(bn.BatchNormError, match="activation is 'rleu'"):
        layer.activation = "rleu"
