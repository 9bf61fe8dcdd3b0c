"""Statistics by time step: which row normalises, which is updated, and the switches that decide it."""

import copy

import pytest
import torch
from recurrent_cases import CELLS, KINDS, LAYERS, close, numpy_run, packed, randomise, same_as_numpy, sequences_of
from torch import nn
from torch.optim.swa_utils import update_bn

import batchnorm as bn
from batchnorm.layers.recurrent_norm import StepBatchNorm

X = torch.float64


def buffers_of(model):
    return [b.clone() for b in model.buffers()]


def moved(model, before):
    return [not torch.equal(b, old) for b, old in zip(model.buffers(), before, strict=True)]


def test_every_step_has_its_own_statistics(path):
    norm = StepBatchNorm(24, max_length=3, momentum=1.0, beta=True)
    batches = torch.randn(5, 8, 24) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(5, 1, 1) + 7
    for step, x in enumerate(batches):
        y = norm(x, step=step)
        torch.testing.assert_close(y, nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True))
    torch.testing.assert_close(norm.running_mean, batches[:3].mean(1))
    torch.testing.assert_close(norm.running_var, batches[:3].var(1))
    assert norm.num_batches_tracked.tolist() == [1, 1, 1]
    norm.eval()
    for step, x in enumerate(batches):
        row = min(step, 2)
        stock = nn.functional.batch_norm(x, norm.running_mean[row], norm.running_var[row], norm.weight, norm.bias)
        torch.testing.assert_close(norm(x, step=step), stock)


def test_residual_is_added():
    norm = StepBatchNorm(24)
    x, r = torch.randn(8, 24), torch.randn(8, 24)
    torch.testing.assert_close(norm(x, r, step=1), norm(x, step=1) + r)
    torch.testing.assert_close(norm.eval()(x, residual=r, step=1), norm(x, step=1) + r)


@pytest.mark.parametrize(
    ("seen", "rows"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3, 3, 3]),
        ([1, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ([2, 5, 0, 0], [0, 1, 1, 1, 1, 1]),
        ([2, 0, 3, 0], [0, 0, 2, 2, 2, 2]),
        ([0, 0, 1, 0], [0, 1, 2, 2, 2, 2]),
        ([1, 1, 1, 1], [0, 1, 2, 3, 3, 3]),
    ],
)
def test_the_last_step_that_was_seen_speaks_for_those_that_were_not(seen, rows):
    norm = StepBatchNorm(2, max_length=4)
    norm.num_batches_tracked.copy_(torch.tensor(seen))
    assert norm.rows_of(0, 6).tolist() == rows
    assert norm.rows_of(2, 3).tolist() == rows[2:5]


@KINDS
def test_a_lone_sequence_is_normalised_by_what_the_walk_has_seen(kind):
    """From nothing: the steps of the lone sequence use the last step that had a batch, in this very pass."""
    layer = LAYERS[kind](3, 4, dtype=X, momentum=1.0)
    sequences = sequences_of([6, 3, 2])
    expected = numpy_run(layer, sequences)
    same_as_numpy(layer, sequences, layer(packed(sequences)), expected)
    assert layer.norm_ih_l0.num_batches_tracked[:7].tolist() == [1, 1, 1, 0, 0, 0, 0]
    products = sequences[0] @ layer.weight_ih_l0.detach().T
    from_batch = layer.norm_ih_l0.running_mean[2]
    close(from_batch, (products[2] + (sequences[1] @ layer.weight_ih_l0.detach().T)[2]) / 2, 1e-12)


@KINDS
@pytest.mark.parametrize("shape", [(7, 1, 3), (7, 3)], ids=["batch of one", "unbatched"])
def test_one_sequence_trains_with_running_statistics_and_says_so(kind, shape):
    layer = randomise(LAYERS[kind](3, 4, dtype=X))
    x = torch.randn(shape, dtype=X)
    before = buffers_of(layer)
    with pytest.warns(bn.BatchNormWarning, match="a batch of one sequence has no statistics") as record:
        result = layer(x)[0]
    assert record[0].filename == __file__
    assert not any(moved(layer, before))
    torch.testing.assert_close(result, layer.eval()(x)[0])  # and in evaluation it says nothing
    with pytest.warns(bn.BatchNormWarning, match="of one sequence"), bn.use_batch_statistics(layer):
        layer(x)
    for norm in layer.train().children():
        norm.statistics = "running"
    layer(x)
    cell = CELLS[kind](3, 4, dtype=X)
    with pytest.warns(bn.BatchNormWarning, match=f"BatchNorm{kind}Cell: a batch of one") as record:
        cell(x[0])
    assert record[0].filename == __file__
    cell.eval()(x[0])


@KINDS
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_no_update(kind, mode, path):
    model = nn.Sequential(LAYERS[kind](8, 24, num_layers=2, bidirectional=True)).train(mode)
    x, before = torch.randn(5, 6, 8), buffers_of(model)
    expected = copy.deepcopy(model)(x)[0]
    with bn.no_update(model):
        torch.testing.assert_close(model(x)[0], expected)
    assert not any(moved(model, before))
    model(x)
    assert all(moved(model, before)) is mode


@KINDS
def test_use_batch_statistics(kind, path):
    layer = randomise(LAYERS[kind](8, 24, bidirectional=True))
    twin, x = copy.deepcopy(layer).eval(), torch.randn(5, 6, 8)
    before = buffers_of(twin)
    expected = layer(x)[0]
    assert not torch.allclose(twin(x)[0], expected, atol=1e-3)
    with bn.use_batch_statistics(twin):
        torch.testing.assert_close(twin(x)[0], expected)
    assert not any(moved(twin, before))


@KINDS
def test_switches_as_arguments_and_attributes(kind, path):
    layer = LAYERS[kind](8, 24, eps=1e-3, momentum=0.5, statistics="running", update=True, nonfinite="raise")
    for norm in layer.children():
        assert (norm.eps, norm.momentum, norm.statistics, norm.update) == (1e-3, 0.5, "running", True)
        assert norm.nonfinite == "raise"
    x = torch.randn(5, 6, 8)
    expected = copy.deepcopy(layer).eval()
    for norm in expected.children():
        norm.update = False
    torch.testing.assert_close(layer(x)[0], expected(x)[0])  # normalised by the running ones, which then move
    products = x @ layer.weight_ih_l0.detach().T
    torch.testing.assert_close(layer.norm_ih_l0.running_mean[:5], 0.5 * products.mean(1))
    torch.testing.assert_close(layer.norm_ih_l0.running_var[:5], 0.5 + 0.5 * products.var(1))
    assert all(norm.num_batches_tracked.tolist() == [1] * 5 + [0] * 95 for norm in layer.children())


def test_learn():
    layer = bn.BatchNormLSTM(3, 4)
    for norm in layer.children():
        norm.learn = False
    layer(torch.randn(5, 6, 3))[0].sum().backward()
    learning = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert learning == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0"}


@KINDS
def test_torchs_update_bn_recomputes_the_statistics(kind):
    """It resets them and sets momentum to None, so that every batch weighs the same."""
    layer = LAYERS[kind](3, 4, dtype=X, batch_first=True)
    batches = [torch.randn(6, length, 3, dtype=X) for length in (4, 4, 7)]
    layer(torch.randn(6, 9, 3, dtype=X))
    update_bn(batches, layer)
    products = [x @ layer.weight_ih_l0.detach().T for x in batches]
    mean = layer.norm_ih_l0.running_mean
    close(mean[2], sum(p[:, 2].mean(0) for p in products) / 3, 1e-12)
    close(mean[5], products[2][:, 5].mean(0), 1e-12)
    assert layer.norm_hh_l0.num_batches_tracked[:8].tolist() == [3] * 4 + [1] * 3 + [0]
    assert layer.norm_ih_l0.momentum == 0.1


@KINDS
def test_a_nonfinite_batch_is_not_kept(kind, path):
    layer = LAYERS[kind](8, 24)
    layer(torch.randn(6, 5, 8))
    x = torch.randn(6, 5, 8)
    x[3, 2] = float("nan")
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with pytest.warns(bn.BatchNormWarning, match="NaN or infinite"):
        layer(x)
    assert layer.norm_ih_l0.num_batches_tracked.tolist()[:7] == [1] * 6 + [0]  # of the input, none is kept
    # The states are sound until the step after the bad input, or at it.
    first_bad = 4
    assert layer.norm_hh_l0.num_batches_tracked.tolist()[:7] == [2] * first_bad + [1] * (6 - first_bad) + [0]
    for name, buffer in layer.named_buffers():
        assert torch.isfinite(buffer).all()
        if buffer.dim() == 2:
            assert torch.equal(buffer[first_bad:], before[name][first_bad:])
    for norm in layer.children():
        norm.nonfinite = "raise"
    with pytest.raises(bn.NonFiniteBatch, match="StepBatchNorm: the batch has NaN"):
        layer(x)


def test_cells_share_nothing_between_steps():
    cell = CELLS["LSTM"](8, 24)
    state = cell(torch.randn(6, 8))
    state = cell(torch.randn(6, 8), state, step=1)
    cell(torch.randn(6, 8), state, step=250)  # beyond max_length: normalised, not kept
    assert cell.norm_c.num_batches_tracked[:3].tolist() == [1, 1, 0]
    assert cell.norm_c.num_batches_tracked.sum() == 2
    assert not torch.equal(cell.norm_c.running_var[0], cell.norm_c.running_var[1])
    assert torch.equal(cell.norm_c.running_var[99], torch.ones(24))
