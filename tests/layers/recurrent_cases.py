"""What the tests of the recurrent layers share: a float64 NumPy implementation, sequence by sequence, and inputs."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import batchnorm as bn
from batchnorm import reference

LAYERS = {"LSTM": bn.BatchNormLSTM, "GRU": bn.BatchNormGRU}
CELLS = {"LSTM": bn.BatchNormLSTMCell, "GRU": bn.BatchNormGRUCell}
STOCK = {"LSTM": nn.LSTM, "GRU": nn.GRU}
STOCK_CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
KINDS = pytest.mark.parametrize("kind", ["LSTM", "GRU"])
LENGTHS = [7, 4, 7, 2, 5]  # neither sorted nor all different; the last steps have two sequences
STATES = {"LSTM": 2, "GRU": 1}


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


class Norm:
    """Batch normalisation per time step, as the layers' documentation describes it."""

    def __init__(self, norm):
        self.gamma = array(norm.weight)
        self.beta = None if norm.bias is None else array(norm.bias)
        self.eps, self.momentum, self.last = norm.eps, norm.momentum, norm.max_length - 1
        self.mean, self.var = array(norm.running_mean), array(norm.running_var)
        self.seen = norm.num_batches_tracked.tolist()

    def __call__(self, x, step, training):
        if training and len(x) > 1:
            result = reference.batch_norm_forward(x, self.gamma, self.beta, self.eps)
            if step <= self.last:
                self.seen[step] += 1
                self.mean[step], self.var[step] = reference.update_running(
                    self.mean[step], self.var[step], result.mu, result.var, result.m, self.momentum, self.seen[step]
                )
            return result.y
        row = own = min(step, self.last)
        while row >= 0 and not self.seen[row]:
            row -= 1
        row = own if row < 0 else row
        return reference.batch_norm_forward(x, self.gamma, self.beta, self.eps, mu=self.mean[row], var=self.var[row]).y


def array(tensor):
    return tensor.detach().double().numpy().copy()


def walk(layer, suffix, sequences, states, training, norms, first=0):
    """One layer in one direction: hidden states for each sequence, and every sequence's last states."""
    p = {
        name: array(value) if value is not None else 0.0
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hn")
        if (value := getattr(layer, name + suffix, None)) is not None or name.startswith("bias")
    }
    for name in ("ih", "hh", "c"):
        if hasattr(layer, f"norm_{name}{suffix}"):
            norms[f"norm_{name}{suffix}"] = Norm(getattr(layer, f"norm_{name}{suffix}"))
    states = [[row.copy() for row in state] for state in states]
    outputs = [[] for _ in sequences]
    for step in range(max(map(len, sequences))):
        running = [b for b, sequence in enumerate(sequences) if len(sequence) > step]
        x = np.stack([sequences[b][step] for b in running])
        h = np.stack([states[0][b] for b in running])
        at = step + first
        x = norms[f"norm_ih{suffix}"](x @ p["weight_ih"].T, at, training) + p["bias_ih"]
        u = norms[f"norm_hh{suffix}"](h @ p["weight_hh"].T, at, training)
        if len(states) == 2:
            c = np.stack([states[1][b] for b in running])
            i, f, g, o = np.split(x + u, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            new = sigmoid(o) * np.tanh(norms[f"norm_c{suffix}"](c, at, training)), c
        else:
            (x_r, x_z, x_n), (u_r, u_z, u_n) = np.split(x, 3, axis=1), np.split(u, 3, axis=1)
            r, z = sigmoid(x_r + u_r), sigmoid(x_z + u_z)
            new = ((1 - z) * np.tanh(x_n + r * (u_n + p["bias_hn"])) + z * h,)
        for state, values in zip(states, new, strict=True):
            for b, value in zip(running, values, strict=True):
                state[b] = value
        for b, value in zip(running, new[0], strict=True):
            outputs[b].append(value)
    return [np.array(rows) for rows in outputs], [np.array(state) for state in states]


def numpy_run(layer, sequences, states=None, training=None):
    """All layers and directions. Returns outputs by sequence, the last states, and the normalisers as they are left."""
    training = layer.training if training is None else training
    kinds = 2 if hasattr(layer, "norm_c_l0") else 1
    data, norms, last = [array(s) for s in sequences], {}, []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in ("", "_reverse") if layer.bidirectional else ("",):
            begin = [
                np.zeros((len(data), layer.hidden_size)) if states is None else array(state[len(last)])
                for state in (states or [None] * kinds)
            ]
            turn = slice(None, None, -1 if direction else 1)
            y, end = walk(layer, f"_l{depth}{direction}", [s[turn] for s in data], begin, training, norms)
            outputs.append([s[turn] for s in y])
            last.append(end)
        data = [np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True)]
    return data, [np.stack(parts) for parts in zip(*last, strict=True)], norms


def same_as_numpy(layer, sequences, result, expected, tolerance=1e-9):
    """Compare the result of a layer with what NumPy found, the statistics that are left behind included."""
    output, last = result
    outputs, states, norms = expected
    if isinstance(output, torch.nn.utils.rnn.PackedSequence):
        padded, lengths = pad_packed_sequence(output)
        assert lengths.tolist() == [len(s) for s in sequences]
        output = padded
    for b, rows in enumerate(outputs):
        close(output[: len(rows), b], rows, tolerance)
    for state, rows in zip(last if isinstance(last, tuple) else (last,), states, strict=True):
        close(state, rows, tolerance)
    for name, norm in norms.items():
        ours = getattr(layer, name)
        close(ours.running_mean, norm.mean, tolerance)
        close(ours.running_var, norm.var, tolerance)
        assert ours.num_batches_tracked.tolist() == norm.seen


def close(actual, expected, tolerance):
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def randomise(layer):
    """Give the normalisers scales, shifts and statistics that no default would produce, all steps seen."""
    with torch.no_grad():
        for module in layer.children():
            module.weight.uniform_(0.3, 1.5)
            if module.bias is not None:
                module.bias.uniform_(-0.5, 0.5)
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.3, 1.5)
            module.num_batches_tracked.fill_(3)
    return layer


def identity(layer):
    """Let every normaliser return what it is given."""
    with torch.no_grad():
        for module in layer.children():
            module.weight.fill_(1.0)
            module.running_mean.zero_()
            module.running_var.fill_(1 - module.eps)
            module.statistics = "running"
            module.update = False
    return layer


def sequences_of(lengths=LENGTHS, size=3, dtype=torch.float64):
    return [torch.randn(length, size, dtype=dtype) for length in lengths]


def packed(sequences):
    return pack_sequence(sequences, enforce_sorted=False)


def states_of(kind, layer, n, dtype=torch.float64, batched=True):
    directions = 2 if layer.bidirectional else 1
    shape = [layer.num_layers * directions, *([n] if batched else []), layer.hidden_size]
    states = tuple(torch.randn(shape, dtype=dtype) for _ in range(STATES[kind]))
    return states if kind == "LSTM" else states[0]


def tuple_of(states):
    return states if isinstance(states, tuple) else (states,)
