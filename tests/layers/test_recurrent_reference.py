"""The recurrent layers against NumPy in float64, written step by step over `reference.batch_norm_forward`."""

import pytest
import torch
from recurrent_cases import (
    CELLS,
    KINDS,
    LAYERS,
    array,
    close,
    numpy_run,
    packed,
    randomise,
    same_as_numpy,
    sequences_of,
    states_of,
    tuple_of,
    walk,
)
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

SETTINGS = pytest.mark.parametrize(
    "setting",
    [{}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False}],
    ids=["plain", "deep", "both ways", "deep, both ways", "no bias"],
)
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@KINDS
@SETTINGS
@MODES
def test_dense(kind, setting, training):
    layer = randomise(LAYERS[kind](3, 4, dtype=torch.float64, max_length=9, **setting)).train(training)
    x = torch.randn(7, 6, 3, dtype=torch.float64)
    expected = numpy_run(layer, list(x.unbind(1)))
    same_as_numpy(layer, x.unbind(1), layer(x), expected)


@KINDS
@SETTINGS
@MODES
def test_packed(kind, setting, training):
    layer = randomise(LAYERS[kind](3, 4, dtype=torch.float64, max_length=9, **setting)).train(training)
    sequences = sequences_of()
    states = states_of(kind, layer, len(sequences))
    expected = numpy_run(layer, sequences, tuple_of(states))
    same_as_numpy(layer, sequences, layer(packed(sequences), states), expected)


@KINDS
@pytest.mark.parametrize(("max_length", "momentum"), [(1, 0.1), (3, 0.1), (5, 0.1), (3, 0.0), (3, None)])
def test_steps_beyond_max_length(kind, max_length, momentum):
    layer = LAYERS[kind](3, 4, dtype=torch.float64, max_length=max_length, bidirectional=True, momentum=momentum)
    for i in range(3):
        sequences = sequences_of()
        expected = numpy_run(layer, sequences)
        same_as_numpy(layer, sequences, layer(packed(sequences)), expected)
        assert layer.norm_ih_l0.num_batches_tracked.tolist() == [i + 1] * max_length
    sequences = sequences_of([9, 1, 12])
    expected = numpy_run(layer.eval(), sequences)
    same_as_numpy(layer, sequences, layer(packed(sequences)), expected)


@KINDS
@pytest.mark.parametrize("momentum", [0.3, None])
def test_training_then_evaluation(kind, momentum):
    """Batches of different lengths, one of them with a lone last sequence; then a longer batch than any before."""
    layer = LAYERS[kind](3, 4, dtype=torch.float64, max_length=20, momentum=momentum)
    for lengths in ([3, 2, 2], [6, 5, 3, 1], [4, 4, 4], [2, 9, 2]):
        sequences = sequences_of(lengths)
        expected = numpy_run(layer, sequences)
        same_as_numpy(layer, sequences, layer(packed(sequences)), expected)
    assert layer.norm_hh_l0.num_batches_tracked.tolist()[:7] == [4, 4, 2, 2, 1, 0, 0]
    sequences = sequences_of([15, 1])
    expected = numpy_run(layer.eval(), sequences)
    same_as_numpy(layer, sequences, layer(packed(sequences)), expected)


@KINDS
@MODES
def test_cell(kind, training):
    cell = randomise(CELLS[kind](3, 4, dtype=torch.float64, max_length=3)).train(training)
    states = tuple(torch.randn(5, 4, dtype=torch.float64) for _ in range(2 if kind == "LSTM" else 1))
    for step in (0, 1, 2, 3):
        x = torch.randn(5, 3, dtype=torch.float64)
        norms = {}
        _, expected = walk(cell, "", list(array(x)[:, None]), list(map(array, states)), training, norms, step)
        result = tuple_of(cell(x, states if kind == "LSTM" else states[0], step=step))
        for actual, rows in zip(result, expected, strict=True):
            close(actual, rows, 1e-9)
        for name, norm in norms.items():
            close(getattr(cell, name).running_var, norm.var, 1e-9)
            assert getattr(cell, name).num_batches_tracked.tolist() == norm.seen
        states = result


@KINDS
@pytest.mark.parametrize("batch", ["dense", "packed"])
def test_float32_on_both_paths(kind, batch, path):
    """Sizes that the compiled kernel takes; forward, states and running statistics."""
    layer = randomise(LAYERS[kind](8, 24, max_length=9, num_layers=2, bidirectional=True))
    sequences = sequences_of([7] * 12 if batch == "dense" else [7, 6, 6, 4, 4, 4, 2, 2, 1, 7, 3], 8, torch.float32)
    for training in (True, False):
        expected = numpy_run(layer.train(training), sequences)
        x = packed(sequences) if batch == "packed" else torch.stack(sequences, 1)
        same_as_numpy(layer, sequences, layer(x), expected, 5e-5)


def test_the_kernel_is_used(kernel_calls):
    layer = LAYERS["LSTM"](8, 24)
    layer(torch.randn(7, 12, 8))
    assert len(kernel_calls) == 1 + 7 + 7  # all steps of the input at once, and two norms at every step
    del kernel_calls[:]
    layer(packed(sequences_of([7, 7, 7, 4, 4], 8, torch.float32)))
    assert len(kernel_calls) == 2 + 7 + 7


@KINDS
def test_what_pads_does_not_matter(kind):
    """Packed from a padded batch, whatever stands in the padding, nothing that comes out depends on it."""
    sequences = sequences_of()
    lengths = torch.tensor([len(s) for s in sequences])
    results = []
    for filler in (0.0, 1e6, float("nan")):
        torch.manual_seed(1)
        layer = LAYERS[kind](3, 4, dtype=torch.float64, num_layers=2, bidirectional=True)
        padded = pad_sequence(sequences, padding_value=filler)
        output, last = layer(pack_padded_sequence(padded, lengths, enforce_sorted=False))
        results.append([output.data, *tuple_of(last), *layer.buffers()])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.equal(a, b)


@KINDS
def test_the_order_of_the_sequences_does_not_matter(kind):
    layer = LAYERS[kind](3, 4, dtype=torch.float64, bidirectional=True)
    sequences = sequences_of([5, 3, 5, 2])
    states = states_of(kind, layer, 4)
    order = [2, 0, 3, 1]
    output, last = layer(packed(sequences), states)
    turned = tuple(state[:, order] for state in tuple_of(states))
    other, other_last = layer(packed([sequences[b] for b in order]), turned if kind == "LSTM" else turned[0])
    (rows, _), (other_rows, _) = map(torch.nn.utils.rnn.pad_packed_sequence, (output, other))
    close(other_rows, rows[:, order], 1e-12)
    for a, b in zip(tuple_of(other_last), tuple_of(last), strict=True):
        close(a, b[:, order], 1e-12)
