"""What torch refuses, `batch_norm` and the layers refuse, and name the argument."""

import numpy as np
import pytest
import torch

import batchnorm as bn
from batchnorm.errors import BatchNormError
from batchnorm.functional import batch_norm, moments

C = 32
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def given(**changes):
    x = torch.linspace(-1, 1, 8 * C * 4).view(8, C, 2, 2)
    return {"x": x, "running_mean": torch.zeros(C), "running_var": torch.ones(C), **changes}


@MODES
@pytest.mark.parametrize(
    "value", ["a", [1.0] * C, 3.0, np.ones(C, dtype="float32")], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("name", ["x", "running_mean", "running_var", "weight", "bias", "residual"])
def test_what_is_no_tensor_is_named(path, name, value, training):
    words = {"x": "the input", "residual": "the residual"}.get(name, name)
    with pytest.raises(BatchNormError, match=f"batch_norm: {words} is a {type(value).__name__}; give a torch.Tensor"):
        batch_norm(**given(**{name: value}), training=training)


def test_no_input_is_no_tensor(path):
    with pytest.raises(BatchNormError, match="the input is a NoneType"):
        batch_norm(**given(x=None))
    with pytest.raises(BatchNormError, match="the input is a list"):
        moments([1.0, 2.0])
    with pytest.raises(BatchNormError, match="the input is a str"):
        batch_norm(**given(x="a"), training=True, groups=2)


@pytest.mark.parametrize("value", [None, "a", [1.0], np.ones((8, 4), dtype="float32")], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(
    "layer",
    [
        bn.BatchNorm1d(4), bn.BatchNorm2d(4), bn.BatchNorm3d(4), bn.SyncBatchNorm(4), bn.GhostBatchNorm(4, 2),
        bn.SplitBatchNorm(4), bn.BatchRenorm(4), bn.FrozenBatchNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_what_a_layer_is_given_is_named(layer, value):
    for mode in (True, False):
        with pytest.raises(
            BatchNormError, match=f"{type(layer).__name__}: the input is a {type(value).__name__}; give"
        ):
            layer.train(mode)(value)


@pytest.mark.parametrize("value", ["0.1", None, [0.1]], ids=repr)
@pytest.mark.parametrize("name", ["momentum", "eps", "negative_slope"])
def test_what_is_no_number_is_named(path, name, value):
    with pytest.raises(BatchNormError, match=f"{name} is .*; give a number"):
        batch_norm(**given(**{name: value}), training=True, activation="leaky_relu")


def test_numbers_of_other_classes_still_count(path):
    expected = batch_norm(**given(), training=True, eps=0.5)
    for eps in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        assert torch.equal(batch_norm(**given(), training=True, eps=eps), expected)


@MODES
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_that_require_a_gradient(path, name, training):
    """torch has no derivative for them; without a graph none is needed."""
    arguments = given()
    arguments[name].requires_grad_()
    with pytest.raises(BatchNormError, match=f"{name} requires a gradient"):
        batch_norm(**arguments, training=training)
    assert torch.equal(arguments["running_mean"], torch.zeros(C))
    with torch.no_grad():
        assert torch.equal(batch_norm(**arguments, training=training), batch_norm(**given(), training=training))


@MODES
@pytest.mark.parametrize("missing", ["running_mean", "running_var"])
def test_one_statistic_alone(path, missing, training):
    with pytest.raises(BatchNormError, match=f"{missing} is missing"):
        batch_norm(**given(**{missing: None}), training=training)
    layer = bn.BatchNorm2d(C).train(training)
    setattr(layer, missing, None)
    with pytest.raises(BatchNormError, match=f"{missing} is missing"):
        layer(given()["x"])


def test_neither_statistic_is_a_layer_without_them(path):
    layer = bn.BatchNorm2d(C)
    layer.running_mean = layer.running_var = None
    x = given()["x"]
    assert torch.equal(layer(x), bn.BatchNorm2d(C, track_running_stats=False)(x))


def aliased():
    row = torch.ones(2 * C)
    pairs = torch.ones(C, 2)
    return {
        "an expanded mean": (torch.zeros(1).expand(C), torch.ones(C)),
        "an expanded variance": (torch.zeros(C), torch.ones(1).expand(C)),
        "one row for both": (row[:C], row[:C]),
        "rows that overlap by one": (row[:C], row[C - 1 : 2 * C - 1]),
        "a strided row over the other": (row[::2], row[:C]),
        "one column for both": (pairs[:, 0], pairs[:, 0]),
    }


@pytest.mark.parametrize("name", aliased())
@pytest.mark.parametrize("groups", [1, 2])
def test_statistics_that_share_memory_cannot_be_updated(path, name, groups):
    mean, var = aliased()[name]
    before = mean.clone(), var.clone()
    with pytest.raises(BatchNormError, match="share one place in memory; clone them"):
        batch_norm(**given(running_mean=mean, running_var=var), training=True, groups=groups)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    expected = given(running_mean=before[0], running_var=before[1])
    assert torch.allclose(batch_norm(**given(running_mean=mean, running_var=var)), batch_norm(**expected), atol=1e-6)


def test_statistics_side_by_side_in_one_storage_are_updated(path):
    x = given()["x"]
    mean, var = torch.zeros(C), torch.ones(C)
    batch_norm(x, mean, var, training=True)
    row = torch.cat([torch.zeros(C), torch.ones(C)])
    columns = torch.stack([torch.zeros(C), torch.ones(C)], 1)
    for m, v in ((row[:C], row[C:]), (columns[:, 0], columns[:, 1])):
        batch_norm(x, m, v, training=True)
        assert torch.allclose(m, mean)
        assert torch.allclose(v, var)


@pytest.mark.filterwarnings("ignore:Sparse C")
@MODES
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_sparse_tensors_are_refused(path, layout, training):
    x = torch.eye(C).to_sparse(layout=layout)
    with pytest.raises(BatchNormError, match=r"the input has the layout torch.sparse_c.*; convert it with to_dense"):
        batch_norm(**given(x=x), training=training)
    if layout is torch.sparse_coo:
        for name in ("running_mean", "weight", "residual"):
            tensor = given()["x"] if name == "residual" else torch.ones(C)
            with pytest.raises(BatchNormError, match=f"{name} has the layout torch.sparse_coo"):
                batch_norm(**given(**{name: tensor.to_sparse()}), training=training)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_complex_tensors_are_refused(path):
    with pytest.raises(BatchNormError, match="the input is a nested tensor"):
        batch_norm(**given(x=torch.nested.nested_tensor([torch.randn(C, 4), torch.randn(C, 5)])), training=True)
    with pytest.raises(BatchNormError, match=r"expected a floating-point input, got torch.complex64"):
        batch_norm(**given(x=given()["x"].to(torch.complex64)), training=True)
