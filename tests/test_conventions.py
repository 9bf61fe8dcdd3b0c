"""Keras's and flax's conventions: the same function, and the same moving averages after another step."""

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn

RANDOM = np.random.default_rng(0)
MEAN, VAR, GAMMA, BETA = (RANDOM.uniform(0.5, 2, 4).astype(np.float32) for _ in range(4))
KERAS = {"gamma": GAMMA, "beta": BETA, "moving_mean": MEAN, "moving_variance": VAR}
FLAX = {"params": {"scale": GAMMA, "bias": BETA}, "batch_stats": {"mean": MEAN, "var": VAR}}
SETTINGS = {"momentum": 0.8, "epsilon": 0.01}


def keras_of(config):
    return bn.from_keras({"weights": KERAS, "config": config}, count=32)


def flax_of(config):
    return bn.from_flax({**FLAX, "settings": config}, count=32)


def built(ours):
    layer = nn.BatchNorm1d(**ours["settings"])
    layer.load_state_dict({name: torch.as_tensor(array) for name, array in ours["state"].items()})
    return layer


@pytest.mark.parametrize("translate", [keras_of, flax_of])
def test_a_training_step_keeps_what_the_other_framework_would(translate):
    layer = built(translate(SETTINGS))
    x = RANDOM.normal(3, 2, (32, 4)).astype(np.float32)
    layer(torch.from_numpy(x))
    # As both frameworks write it: the biased variance enters the moving average, with 1 - momentum.
    mean, var = 0.8 * MEAN + 0.2 * x.mean(0), 0.8 * VAR + 0.2 * x.var(0)
    back = bn.to_keras(layer, count=32)["weights"]
    np.testing.assert_allclose(back["moving_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(back["moving_variance"], var, rtol=1e-5)


@pytest.mark.parametrize("translate", [keras_of, flax_of])
def test_without_a_count_evaluation_is_the_same(translate):
    given = {"weights": KERAS, "config": SETTINGS} if translate is keras_of else {**FLAX, "settings": SETTINGS}
    layer = built((bn.from_keras if translate is keras_of else bn.from_flax)(given)).eval()
    x = RANDOM.normal(3, 2, (8, 4)).astype(np.float32)
    wanted = (x - MEAN) / np.sqrt(VAR + 0.01) * GAMMA + BETA
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [None, 7])
def test_there_and_back(count):
    keras = bn.to_keras(bn.from_keras({"weights": KERAS, "config": SETTINGS}, count=count), count=count)
    for name, array in KERAS.items():
        np.testing.assert_allclose(keras["weights"][name], array, rtol=1e-6)
        assert keras["weights"][name].dtype == np.float32
    assert keras["config"] == {"axis": 1, **SETTINGS, "center": True, "scale": True}
    flax = bn.to_flax(bn.from_flax({**FLAX, "settings": SETTINGS}, count=count), count=count)
    np.testing.assert_allclose(flax["batch_stats"]["var"], VAR, rtol=1e-6)
    np.testing.assert_array_equal(flax["batch_stats"]["mean"], MEAN)
    np.testing.assert_array_equal(flax["params"]["scale"], GAMMA)
    np.testing.assert_array_equal(flax["params"]["bias"], BETA)
    assert flax["settings"] == {**SETTINGS, "use_bias": True, "use_scale": True}


def test_defaults_are_each_frameworks_own():
    keras = bn.from_keras({"weights": KERAS})["settings"]
    assert (keras["momentum"], keras["eps"]) == (0.01, 1e-3)
    flax = bn.from_flax(FLAX)["settings"]
    assert (flax["momentum"], flax["eps"]) == (0.01, 1e-5)
    assert bn.to_keras(nn.BatchNorm1d(2))["config"]["momentum"] == 0.9


def test_names_and_lists_of_keras():
    named = {f"block/bn/{name}:0": array for name, array in KERAS.items()}
    listed = bn.from_keras({"weights": list(KERAS.values())})
    for name, array in bn.from_keras({"weights": named})["state"].items():
        np.testing.assert_array_equal(array, listed["state"][name])
    no_gamma = bn.from_keras({"weights": [BETA, MEAN, VAR], "config": {"scale": False}})
    np.testing.assert_array_equal(no_gamma["state"]["weight"], np.ones(4))
    np.testing.assert_array_equal(no_gamma["state"]["bias"], BETA)
    bare = bn.from_keras({"weights": [MEAN, VAR], "config": {"scale": False, "center": False}})
    assert bare["settings"]["affine"] is False
    assert "weight" not in bare["state"]


def test_a_layer_is_copied_not_shared():
    layer = bn.BatchNorm2d(4, dtype=torch.bfloat16)
    theirs = bn.to_flax(layer)
    with torch.no_grad():
        layer.running_mean.fill_(9)
    np.testing.assert_array_equal(theirs["batch_stats"]["mean"], np.zeros(4))
    assert bn.to_flax(bn.BatchNorm2d(4, affine=False))["params"] == {}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bn.from_keras({"config": {}}), "'weights' is missing"),
        (lambda: bn.from_keras([1, 2]), "'weights' is missing .*list"),
        (lambda: bn.from_keras({"weights": [GAMMA, BETA, MEAN]}), "there are 3 weights for gamma, beta"),
        (lambda: bn.from_keras({"weights": {"kernel": MEAN}}), "'kernel' is not a part"),
        (lambda: bn.from_keras({"weights": {"moving_mean": MEAN}}), "there is no running_var"),
        (lambda: bn.from_keras({"weights": KERAS, "config": {"momentum": 99}}), "momentum is 99"),
        (lambda: bn.from_keras({"weights": KERAS}, count=1), "count is 1"),
        (lambda: bn.from_flax({"params": {}}), "'batch_stats' is missing"),
        (lambda: bn.from_flax({"batch_stats": {"mean": MEAN, "var": VAR[:2]}}), "has the shape"),
        (lambda: bn.to_keras(nn.BatchNorm1d(2, momentum=None)), "momentum None"),
        (lambda: bn.to_flax(nn.BatchNorm1d(2, track_running_stats=False)), "no running statistics"),
        (lambda: bn.to_flax({"weights": {}}), "'state' is missing"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(bn.BatchNormError, match=words):
        call()
