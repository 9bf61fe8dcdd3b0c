"""Features that meet: each pair either works, or is refused or reported, and never fails in silence."""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn


def small_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_accumulate_says_that_recurrent_statistics_move_as_before():
    torch.manual_seed(0)
    lstm = bn.BatchNormLSTM(4, 8)
    with pytest.warns(bn.BatchNormWarning, match="norm_ih_l0 keeps statistics for every time step"):
        step = bn.accumulate(lstm).__enter__()
    for _ in range(3):
        lstm(torch.randn(5, 6, 4))
    step.__exit__(None, None, None)
    assert lstm.norm_ih_l0.num_batches_tracked[:6].tolist() == [3, 3, 3, 3, 3, 0]


def test_adapt_leaves_recurrent_statistics_with_the_reason():
    model = nn.ModuleDict({"lstm": bn.BatchNormLSTM(4, 8), "norm": nn.BatchNorm1d(4)})

    def forward(model, batch):
        return model["lstm"](model["norm"](batch.flatten(0, 1)).view_as(batch))[0]

    adapted, handle = bn.adapt(model, [torch.randn(5, 6, 4) + 3], forward=forward)
    assert "every time step" in handle.report.left["lstm.norm_ih_l0"]
    assert handle.report.paths == ("norm",)
    assert float(adapted["norm"].running_mean.mean()) == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("first", ["freeze", "convert"])
def test_a_frozen_layer_is_not_converted(first):
    """In both orders the freeze holds, and after it the layer is what it was before."""
    model = small_model()
    if first == "convert":
        model, _ = bn.convert(model, "sync")
    kind = type(model[1])
    frozen, _ = bn.freeze(model)
    again, report = bn.convert(frozen, "sync" if first == "freeze" else "batch")
    assert "frozen" in report.left["1"]
    again.train()(torch.randn(4, 3, 8, 8))
    assert int(again[1].num_batches_tracked) == 0
    thawed, _ = bn.unfreeze(again)
    assert type(thawed[1]) is kind


def test_a_copy_made_while_accumulating_is_free_of_it():
    layer = bn.BatchNorm1d(3)
    stock = nn.BatchNorm1d(3)
    for original in (layer, stock):
        with bn.accumulate(original):
            twin = copy.deepcopy(original)
            original(torch.randn(4, 3))
            original(torch.randn(4, 3))
        for _ in range(3):
            twin(torch.randn(4, 3))
        assert int(twin.num_batches_tracked) == 3
        assert int(original.num_batches_tracked) == 1


@pytest.mark.parametrize("layer", [bn.GhostBatchNorm(4, 1), bn.SplitBatchNorm(4, 4)], ids=["ghost", "split"])
def test_groups_that_would_have_too_few_values_use_running_statistics_on_request(layer):
    x = torch.randn(3, 4)
    with pytest.raises(bn.BatchNormError):
        layer(x)
    layer.one_value = "running"
    torch.testing.assert_close(layer(x), copy.deepcopy(layer).eval()(x))
    assert int(layer.num_batches_tracked) == 0


@pytest.mark.parametrize("lengths", [[25, 7], [3, -1]], ids=str)
def test_a_length_that_cannot_be_is_refused(lengths):
    with pytest.raises(bn.BatchNormError, match=r"has a length of (25|-1) for an axis of 20"):
        bn.BatchNorm1d(3)(torch.randn(2, 3, 20), mask=torch.tensor(lengths))


@pytest.mark.parametrize(
    "make", [lambda: bn.GhostBatchNorm(4, 4), lambda: bn.SplitBatchNorm(4, 2, shuffle=True)], ids=["ghost", "split"]
)
def test_one_compiled_graph_serves_batches_of_many_sizes(make):
    torch._dynamo.reset()
    layer = make()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    for samples in range(8, 24):  # more sizes than torch.compile is willing to recompile for
        x = torch.randn(samples, 4)
        torch.manual_seed(samples)
        expected = layer(x)
        torch.manual_seed(samples)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bn.make_norm("batch", 16, True), "dims, the number of position axes, is True"),
        (lambda: bn.adapt(small_model(), 3), "the batches are a int; give a list of batches, or a DataLoader"),
        (lambda: bn.convert(nn.Sequential(nn.LazyBatchNorm2d()), "sync"), "run the model once"),
    ],
    ids=["dims", "no batches", "lazy"],
)
def test_mistakes_get_one_sentence(call, message):
    with pytest.raises(bn.BatchNormError, match=message):
        call()
