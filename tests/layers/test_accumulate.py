"""``accumulate``: micro-batches enter the running statistics once, as the batch they are parts of."""

import copy

import numpy as np
import pytest
import torch
from layer_cases import OURS, STOCK, TOLERANCE, example, randomise
from torch import nn

import batchnorm as bn
from batchnorm import reference

CLASSES = pytest.mark.parametrize("classes", [STOCK, OURS], ids=["stock", "ours"])
SPLITS = pytest.mark.parametrize("sizes", [[16], [4, 4, 4, 4], [7, 2, 5, 2]], ids=str)


def numbers(tensor):
    return tensor.detach().double().numpy().copy()


def buffers_of(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def assert_buffers(model, before):
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@CLASSES
@SPLITS
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.3, 1.0, None])
def test_against_the_reference(classes, sizes, dims, momentum, path):
    layer = randomise(classes[dims](24, momentum=momentum))
    layer.num_batches_tracked.fill_(4)
    shape = {1: (16, 24, 3), 2: (16, 24, 5, 2), 3: (16, 24, 2, 1, 3)}[dims]
    x = example(dims, shape=shape) + torch.arange(16.0).reshape(-1, *[1] * (len(shape) - 1))  # parts that differ
    parts = [numbers(part) for part in x.split(sizes)]
    mu, var = reference.merged_statistics(parts)
    before = numbers(layer.running_mean), numbers(layer.running_var)
    expected = reference.update_running(*before, mu, var, x.numel() // 24, momentum, 5)
    with bn.accumulate(layer):
        for part in x.split(sizes):
            layer(part)
            np.testing.assert_array_equal(numbers(layer.running_mean), before[0])
    np.testing.assert_allclose(numbers(layer.running_mean), expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(numbers(layer.running_var), expected[1], rtol=1e-6, atol=1e-6)
    assert int(layer.num_batches_tracked) == 5
    # And that is what the layer makes of the whole batch.
    whole = copy.deepcopy(layer)
    whole.running_mean.copy_(torch.from_numpy(before[0]))
    whole.running_var.copy_(torch.from_numpy(before[1]))
    whole.num_batches_tracked.fill_(4)
    whole(x)
    torch.testing.assert_close(layer.running_var, whole.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_mean, whole.running_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype, path):
    layer = bn.BatchNorm2d(24, momentum=1.0, dtype=dtype)
    x = example(2, dtype) + 300
    with bn.accumulate(layer):
        for part in x.split(2):
            layer(part)
    mean, var = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3))
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=TOLERANCE[dtype], atol=0)
    torch.testing.assert_close(layer.running_var.double(), var, rtol=TOLERANCE[dtype], atol=0)
    assert layer.running_mean.dtype == dtype


def model_of(classes):
    shared = classes[2](8)
    return nn.Sequential(nn.Conv2d(3, 8, 1), classes[2](8), nn.ReLU(), shared, shared, nn.Dropout(0.5))


@CLASSES
def test_outputs_and_gradients_are_those_without(classes, path):
    model = model_of(classes)
    twin = copy.deepcopy(model)
    parts = torch.randn(8, 3, 4, 4).split(2)
    outputs = []
    for each in (model, twin):
        torch.manual_seed(1)
        if each is model:
            with bn.accumulate(each):
                outputs.append([each(part) for part in parts])
        else:
            outputs.append([each(part) for part in parts])
        sum(y.square().sum() for y in outputs[-1]).backward()
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert int(model[1].num_batches_tracked) == 1
    assert int(twin[1].num_batches_tracked) == 4
    assert int(model[3].num_batches_tracked) == 1  # although it is called twice a pass


def attributes(model):
    names = ("training", "track_running_stats", "update", "statistics", "momentum", "_forward_pre_hooks")
    return [{n: copy.copy(getattr(m, n, None)) for n in names} for m in model.modules()]


@CLASSES
def test_an_exception_leaves_all_as_it_was(classes, path):
    model = model_of(classes)
    before, switches = buffers_of(model), attributes(model)
    with pytest.raises(ZeroDivisionError), bn.accumulate(model):  # noqa: PT012
        model(torch.randn(4, 3, 4, 4))
        _ = 1 / 0
    assert_buffers(model, before)
    assert attributes(model) == switches
    with bn.accumulate(model):
        model(torch.randn(4, 3, 4, 4))
    assert int(model[1].num_batches_tracked) == 1
    assert attributes(model) == switches


@CLASSES
def test_what_does_not_update_is_not_updated(classes, path):
    model = model_of(classes)
    model[1].eval()
    frozen = bn.freeze(classes[2](8))[0]
    model.append(frozen)
    before, x = buffers_of(model), torch.randn(4, 3, 4, 4)
    twin = copy.deepcopy(model)
    with bn.accumulate(twin):
        twin(x)
    with bn.accumulate(model):
        model(x)
        with bn.no_update(model):
            model(torch.randn(4, 3, 4, 4) + 100)
        model.eval()(torch.randn(4, 3, 4, 4) + 100)
        model.train()
        model[1].eval()
    moved = {name for name, b in model.named_buffers() if not torch.equal(b, before[name])}
    assert moved == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
    assert_buffers(model, buffers_of(twin))
    with bn.accumulate(model.eval()):
        model(torch.randn(4, 3, 4, 4))
    with bn.accumulate(model.train()):
        pass
    assert int(model[3].num_batches_tracked) == 1


def test_update_overrules_the_mode(path):
    layer = bn.BatchNorm1d(4, update=True, momentum=1.0).eval()
    x = torch.randn(12, 4) + 2
    with bn.accumulate(layer):
        for part in x.split(3):
            layer(input=part)
    torch.testing.assert_close(layer.running_mean, x.mean(0))
    assert layer.update is True
    blind = bn.BatchNorm1d(4, track_running_stats=False)
    with bn.accumulate(blind):
        blind(x)


@CLASSES
def test_discard(classes, path):
    model = model_of(classes)
    before, switches = buffers_of(model), attributes(model)
    with bn.accumulate(model) as step:
        model(torch.randn(4, 3, 4, 4))
        step.discard()
        assert attributes(model) == switches
    assert_buffers(model, before)


def test_nested_and_used_up():
    model = model_of(OURS)
    with bn.accumulate(model) as step:
        with (
            pytest.raises(bn.BatchNormError, match=r"accumulate: 1 is in another accumulation .*; leave that one"),
            bn.accumulate(model),
        ):
            pass
        with pytest.raises(bn.BatchNormError, match="the model is in another"):
            bn.accumulate(model[3]).__enter__()
        with pytest.raises(bn.BatchNormError, match="this accumulation is open already; make a new one"):
            step.__enter__()
        model(torch.randn(4, 3, 4, 4))  # the refused ones have not touched the first
    assert int(model[1].num_batches_tracked) == 1
    with pytest.raises(bn.BatchNormError, match="this accumulation is ended"), step:
        pass
    abandoned = bn.accumulate(model)
    abandoned.__enter__()
    with pytest.raises(bn.BatchNormError, match="has not ended"), bn.accumulate(model):
        pass
    abandoned.discard()
    with bn.accumulate(model), bn.accumulate(model_of(OURS)):
        pass


@CLASSES
def test_a_bad_micro_batch_does_not_get_in(classes, path):
    layer = classes[1](4, momentum=1.0)
    good, bad = torch.randn(6, 4), torch.randn(6, 4)
    bad[0, 0] = float("nan")
    with bn.accumulate(layer):
        layer(good)
        with pytest.warns(bn.BatchNormWarning, match="NaN or infinite"):
            layer(bad)
    torch.testing.assert_close(layer.running_mean, good.mean(0))
    if classes is OURS:
        layer.nonfinite = "raise"
        before = buffers_of(layer)
        with pytest.raises(bn.NonFiniteBatch), bn.accumulate(layer):  # noqa: PT012
            layer(good)
            layer(bad)
        assert_buffers(layer, before)


def test_single_values(path):
    layer = bn.BatchNorm1d(4, one_value="running", momentum=1.0)
    x = torch.randn(5, 4)
    with bn.accumulate(layer):
        layer(x[:4])
        layer(x[4:])
        layer(x[:0])
    torch.testing.assert_close(layer.running_mean, x[:4].mean(0))


def test_micro_batches_of_one_value_make_a_batch(path):
    """Where running statistics normalise, one example has its place."""
    layer = bn.BatchNorm1d(4, statistics="running", update=True, momentum=1.0)
    before, x = buffers_of(layer), torch.randn(3, 4)
    with bn.accumulate(layer):
        layer(x[:1])
    assert_buffers(layer, before)  # one value in all has no variance
    with bn.accumulate(layer):
        for part in x.split(1):
            layer(part)
    torch.testing.assert_close(layer.running_var, x.var(0))
    assert int(layer.num_batches_tracked) == 1


@CLASSES
def test_compiled(classes):
    torch._dynamo.reset()
    layer = classes[2](24, momentum=1.0)
    compiled = torch.compile(layer, backend="aot_eager")
    x = example(2)
    compiled(x)
    with bn.accumulate(layer):
        for part in x.split(2):
            compiled(part)
    torch.testing.assert_close(layer.running_var, x.var((0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert int(layer.num_batches_tracked) == 2
    compiled(x)
    assert int(layer.num_batches_tracked) == 3
    torch._dynamo.reset()


@pytest.mark.parametrize("cls", [bn.MaskedBatchNorm, bn.BatchNorm1d], ids=["masked", "plain"])
def test_padding_does_not_count(cls, path):
    layer = cls(24, momentum=1.0)
    lengths = torch.tensor([5, 2, 4, 1, 3, 5])
    x = example(1, shape=(6, 24, 5))
    valid = [x[i, :, :n].T for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        x[i, :, n:] = float("nan")
    with bn.accumulate(layer):
        for part, length in zip(x.split(2), lengths.split(2), strict=True):
            layer(part, mask=length)
    mean, var = reference.merged_statistics([numbers(v) for v in valid])
    np.testing.assert_allclose(numbers(layer.running_mean), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(layer.running_var), var * 20 / 19, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [bn.GhostBatchNorm, bn.SplitBatchNorm, bn.BatchRenorm], ids=lambda cls: cls.__name__)
def test_the_rest_of_the_family(cls, path):
    layer, whole = cls(24, momentum=0.3), cls(24, momentum=0.3)
    x = example(2)
    with bn.accumulate(layer):
        for part in x.split(2):
            layer(part)
    whole(x)
    torch.testing.assert_close(layer.running_mean, whole.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_var, whole.running_var, rtol=1e-5, atol=1e-6)


def test_a_forward_that_takes_whatever_it_is_given():
    """So does a class with a forward of its own once `convert` has synchronised it."""

    class Doubled(nn.BatchNorm1d):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, _ = bn.convert(Doubled(3, momentum=1.0), "sync")
    x = torch.randn(8, 3)
    with bn.accumulate(layer):
        layer(x[:4])
        layer(x=x[4:])
    torch.testing.assert_close(layer.running_mean, x.mean(0))
    model, _ = bn.calibrate(nn.Sequential(layer), [x + 1])
    torch.testing.assert_close(model[0].running_mean, x.mean(0) + 1)
