"""``batch_norm`` as a function: torch's arguments, the reference's numbers."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from batchnorm import reference
from batchnorm.functional import batch_norm


def tensors(shape=(6, 20, 3, 4), seed=0):
    torch.manual_seed(seed)
    channels = shape[1]
    return {
        "x": torch.randn(shape) * 2 + 1,
        "running_mean": torch.randn(channels),
        "running_var": torch.rand(channels) + 0.5,
        "weight": torch.rand(channels) + 0.5,
        "bias": torch.randn(channels),
        "residual": torch.randn(shape),
    }


def numbers(tensor):
    return tensor.detach().double().numpy().copy()


def test_the_first_eight_arguments_are_torchs():
    theirs, ours = (list(inspect.signature(f).parameters.values()) for f in (F.batch_norm, batch_norm))
    assert [p.name for p in ours[1:8]] == [p.name for p in theirs[1:8]]
    assert [p.default for p in ours[3:8]] == [p.default for p in theirs[3:8]]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[8:])
    x = torch.randn(8, 20)
    mean, var, weight = torch.randn(20), torch.rand(20) + 0.5, torch.rand(20)
    positional = (mean, var, weight, None, False, 0.3, 1e-2)
    torch.testing.assert_close(batch_norm(x, *positional), F.batch_norm(x, *positional), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_outputs_gradients_and_statistics_against_the_reference(activation, with_residual, training, path):
    given = tensors()
    leaves = [given[name].requires_grad_() for name in ("x", "weight", "bias", "residual")]
    mean, var = given["running_mean"].clone(), given["running_var"].clone()
    y = batch_norm(
        given["x"],
        mean,
        var,
        given["weight"],
        given["bias"],
        training,
        0.3,
        1e-3,
        activation=activation,
        residual=given["residual"] if with_residual else None,
        negative_slope=0.2,
    )
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, dy, allow_unused=True)

    common = {
        "gamma": numbers(given["weight"]),
        "beta": numbers(given["bias"]),
        "eps": 1e-3,
        "activation": activation,
        "residual": numbers(given["residual"]) if with_residual else None,
        "negative_slope": 0.2,
    }
    if not training:
        common |= {"mu": numbers(given["running_mean"]), "var": numbers(given["running_var"])}
    forward = reference.batch_norm_forward(numbers(given["x"]), **common)
    backward = reference.batch_norm_backward(numbers(dy), numbers(given["x"]), **common)
    np.testing.assert_allclose(numbers(y), forward.y, rtol=1e-5, atol=1e-5)
    expected = [backward.dx, backward.dgamma, backward.dbeta]
    if with_residual:
        derivative = reference.ACTIVATIONS[activation][1]
        z = reference.batch_norm_forward(numbers(given["x"]), **{**common, "activation": "none"}).y
        expected.append(numbers(dy) * derivative(z, 0.2))
    else:
        assert gradients[3] is None
    for actual, target in zip(gradients, expected, strict=False):
        np.testing.assert_allclose(numbers(actual), target, rtol=1e-4, atol=2e-5 * np.abs(target).max())

    moved = numbers(given["running_mean"]), numbers(given["running_var"])
    if training:
        moved = reference.update_running(*moved, forward.mu, forward.var, forward.m, 0.3)
    np.testing.assert_allclose(numbers(mean), moved[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(var), moved[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", [("weight",), ("bias",), ("weight", "bias"), ()], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_any_of_weight_and_bias(which, training, path):
    given = tensors()
    parameters = [given[name] if name in which else None for name in ("weight", "bias")]
    statistics = given["running_mean"], given["running_var"]
    torch.testing.assert_close(
        batch_norm(given["x"], *map(torch.clone, statistics), *parameters, training),
        F.batch_norm(given["x"], *statistics, *parameters, training),
        rtol=1e-4,
        atol=1e-5,
    )


def test_evaluation_and_training_without_statistics_update_nothing(path):
    given = tensors()
    mean, var = given["running_mean"].clone(), given["running_var"].clone()
    batch_norm(given["x"], mean, var)
    assert torch.equal(mean, given["running_mean"])
    assert torch.equal(var, given["running_var"])
    batch_norm(given["x"], None, None, training=True)


def test_activation_none_in_both_spellings(path):
    x = tensors()["x"]
    plain = batch_norm(x, None, None, training=True)
    assert torch.equal(batch_norm(x, None, None, training=True, activation=None), plain)
    assert torch.equal(batch_norm(x, None, None, training=True, activation="none"), plain)
    assert plain.min() < 0


@pytest.mark.parametrize("shape", [(2, 5, 3, 3, 2, 2), (4, 20), (3, 7, 1, 1), (1, 16, 2)], ids=str)
def test_any_number_of_dimensions(shape, path):
    given = tensors(shape)
    expected = reference.batch_norm_forward(numbers(given["x"]))
    np.testing.assert_allclose(
        numbers(batch_norm(given["x"], None, None, training=True)), expected.y, rtol=1e-4, atol=1e-5
    )


def test_a_residual_of_another_dtype_promotes_as_addition_does(path):
    given = tensors()
    y = batch_norm(given["x"], None, None, training=True, residual=given["residual"].double())
    assert y.dtype == torch.float64
    narrow = batch_norm(given["x"].bfloat16(), None, None, training=True, residual=given["residual"].bfloat16())
    assert narrow.dtype == torch.bfloat16


def test_the_switch_of_the_environment_forces_torch(monkeypatch):
    from batchnorm.kernels.native import load

    monkeypatch.setenv("BATCHNORM_KERNEL", "torch")
    kernel, reason = load()
    assert kernel is None
    assert "BATCHNORM_KERNEL=torch" in reason
