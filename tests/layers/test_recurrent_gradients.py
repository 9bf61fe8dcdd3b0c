"""The gradients of the recurrent layers, in float64 against differences, in float32 against float64."""

import copy

import pytest
import torch
from recurrent_cases import CELLS, KINDS, LAYERS, packed, randomise, same_as_numpy, sequences_of, states_of, tuple_of
from torch.nn.utils.rnn import PackedSequence


def function_of(layer, shape=None):
    """The layer as a function of its input's values, its initial states and all its parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def function(data, *rest):
        kinds = len(rest) - len(names)
        states = rest[:kinds] if kinds == 2 else rest[0]
        x = data if shape is None else PackedSequence(data, *shape)
        parameters = dict(zip(names, rest[kinds:], strict=True))
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        output, last = torch.func.functional_call(layer, parameters | buffers, (x, states))
        return (output if shape is None else output.data, *tuple_of(last))

    return function, [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]


@KINDS
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch", ["dense", "packed"])
def test_gradients_against_differences(kind, training, batch):
    """Inputs, initial states and every parameter; the packed batch ends with a step of one sequence."""
    layer = randomise(LAYERS[kind](2, 3, dtype=torch.float64, max_length=4, bidirectional=True, num_layers=1))
    layer.train(training)
    x = packed(sequences_of([4, 2, 3, 2], 2)) if batch == "packed" else torch.randn(4, 4, 2, dtype=torch.float64)
    shape = x[1:] if batch == "packed" else None
    function, parameters = function_of(layer, shape)
    data = (x.data if batch == "packed" else x).requires_grad_()
    states = [state.requires_grad_() for state in tuple_of(states_of(kind, layer, 4))]
    assert torch.autograd.gradcheck(function, (data, *states, *parameters), fast_mode=True)


@KINDS
def test_gradients_through_two_layers(kind):
    layer = randomise(LAYERS[kind](2, 3, dtype=torch.float64, max_length=4, num_layers=2))
    function, parameters = function_of(layer)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    states = [state.requires_grad_() for state in tuple_of(states_of(kind, layer, 4))]
    assert torch.autograd.gradcheck(function, (x, *states, *parameters), fast_mode=True)


@KINDS
def test_every_gradient_of_a_cell(kind):
    """The whole Jacobian, entry by entry, where it is small."""
    cell = randomise(CELLS[kind](2, 2, dtype=torch.float64))
    names = [name for name, _ in cell.named_parameters()]

    def function(x, h, c, *parameters):
        state = (h, c) if kind == "LSTM" else h
        state = torch.func.functional_call(cell, dict(zip(names, parameters, strict=True)), (x, state), {"step": 1})
        return state

    inputs = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    parameters = [p.detach().clone().requires_grad_() for p in cell.parameters()]
    assert torch.autograd.gradcheck(function, (*inputs, *parameters))


@KINDS
def test_second_derivatives(kind):
    cell = randomise(CELLS[kind](2, 3, dtype=torch.float64))

    def function(x, *states):
        return cell(x, states if kind == "LSTM" else states[0], step=0)

    cell.norm_ih.update = cell.norm_hh.update = False
    if kind == "LSTM":
        cell.norm_c.update = False
    shapes = [(4, 2), (4, 3)] + [(4, 3)] * (kind == "LSTM")
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(function, inputs)


@KINDS
@pytest.mark.parametrize("batch", ["dense", "packed"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_float32_gradients_on_both_paths(kind, batch, training, path):
    double = randomise(LAYERS[kind](8, 24, dtype=torch.float64, num_layers=2, bidirectional=True)).train(training)
    single = copy.deepcopy(double).float()
    lengths = [6] * 9 if batch == "dense" else [6, 6, 6, 5, 4, 4, 2, 1, 1]
    sequences = sequences_of(lengths, 8)
    weights = torch.randn(sum(lengths), 48, dtype=torch.float64)
    results = []
    for layer, dtype in ((double, torch.float64), (single, torch.float32)):
        cast = [s.to(dtype) for s in sequences]
        x = packed(cast) if batch == "packed" else torch.stack(cast, 1)
        data = (x.data if batch == "packed" else x).requires_grad_()
        output, last = layer(PackedSequence(data, *x[1:]) if batch == "packed" else data)
        rows = output.data if batch == "packed" else output.flatten(0, 1)
        loss = (rows * weights.to(dtype)).sum() + sum(state.square().sum() for state in tuple_of(last))
        results.append(torch.autograd.grad(loss, [data, *layer.parameters()]))
    for actual, expected in zip(results[1], results[0], strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3 * largest)


@KINDS
def test_buffers_may_move_between_forward_and_backward(kind, path):
    """A second forward pass updates the statistics before the first one's backward pass."""
    layer = LAYERS[kind](8, 24)
    x, other = torch.randn(5, 6, 8, requires_grad=True), torch.randn(5, 6, 8)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), x)[0]
    loss = layer(x)[0].square().sum()
    layer(other)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected)


def test_numpy_would_notice():
    """The comparison itself fails if an output is a little off."""
    from recurrent_cases import numpy_run

    layer = LAYERS["GRU"](3, 4, dtype=torch.float64)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    expected = numpy_run(layer, list(x.unbind(1)))
    output, last = layer(x)
    with pytest.raises(AssertionError):
        same_as_numpy(layer, x.unbind(1), (output + 1e-6, last), expected)
