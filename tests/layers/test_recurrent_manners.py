"""How the recurrent layers behave: bad input, copies, other dtypes, tracers, and that they learn."""

import copy
import io
import pickle

import pytest
import torch
from recurrent_cases import CELLS, KINDS, LAYERS, packed, randomise, sequences_of, states_of, tuple_of
from torch import nn

import batchnorm as bn
from batchnorm.layers.recurrent_norm import StepBatchNorm

BAD_ARGUMENTS = [
    ({"proj_size": 2}, "proj_size is 2, but this layer has no projection; leave proj_size out"),
    ({"input_size": 0}, "input_size is 0; give it as a whole number above zero"),
    ({"hidden_size": 2.5}, "hidden_size is 2.5; give it as a whole number"),
    ({"num_layers": 0}, "num_layers is 0; give a whole number above zero"),
    ({"dropout": 1.5}, "dropout is 1.5; give a probability from 0 to 1"),
    ({"dropout": True}, "dropout is True; give a probability"),
    ({"max_length": 0}, "max_length is 0; give the number of steps"),
    ({"statistics": "all"}, "statistics is 'all'; use one of 'auto', 'batch', 'running'"),
]


@KINDS
@pytest.mark.parametrize(("arguments", "sentence"), BAD_ARGUMENTS)
def test_bad_arguments(kind, arguments, sentence):
    with pytest.raises(bn.BatchNormError, match=sentence):
        LAYERS[kind](**({"input_size": 3, "hidden_size": 4} | arguments))
    with pytest.raises(TypeError):
        LAYERS[kind](3, 4, activation="relu")


@KINDS
@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(3), r"expected an input of 3 dimensions \(time, batch, features\), of 2 .* got shape \[3\]"),
        (torch.zeros(2, 2, 2, 3), r"got shape \[2, 2, 2, 3\]; add what is missing"),
        ([1.0], "got a list"),
        (torch.zeros(7, 5, 2), r"the input has 2 features .*\[7, 5, 2\]\), but input_size is 3; use input_size=2"),
        (torch.zeros(0, 5, 3), r"the input of shape \[0, 5, 3\] has no time step"),
        (torch.zeros(7, 5, 3, dtype=torch.float64), "the input is torch.float64, the weights are"),
        (torch.zeros(7, 5, 3, dtype=torch.long), "the input is torch.int64, the weights are torch.float32; convert"),
        (torch.zeros(7, 5, 3, device="meta"), r"the input is on meta, the weights are on cpu; move one of them"),
        (packed(sequences_of(size=2, dtype=torch.float32)), "the packed input has 2 features"),
    ],
)
def test_bad_inputs(kind, x, sentence):
    with pytest.raises(bn.BatchNormError, match=f"BatchNorm{kind}: .*{sentence}"):
        LAYERS[kind](3, 4)(x)


@KINDS
def test_bad_states(kind):
    layer, x = LAYERS[kind](3, 4, 2), torch.zeros(7, 5, 3)
    good = states_of(kind, layer, 5, torch.float32)
    layer(x, good)
    for wrong in (torch.zeros(1, 5, 4), torch.zeros(2, 4), torch.zeros(2, 6, 4)):
        hx = (good[0], wrong) if kind == "LSTM" else wrong
        name = "c_0" if kind == "LSTM" else "h_0"
        with pytest.raises(bn.BatchNormError, match=rf"{name} has shape .*, but .* has to be \[2, 5, 4\]; give it"):
            layer(x, hx)
    with pytest.raises(bn.BatchNormError, match=r"h_0 has shape \[2, 5, 4\], but .* has to be \[2, 4\]"):
        layer.eval()(x[:, 0], good)
    with pytest.raises(bn.BatchNormError, match=r"h_0 has shape .* has to be \[2, 2, 4\]"):
        layer(packed(sequences_of([3, 2], dtype=torch.float32)), good)
    hx, sentence = (
        (torch.zeros(2, 5, 4), r"hx is one tensor, but it has to be the pair \(h_0, c_0\)")
        if kind == "LSTM"
        else ((torch.zeros(2, 5, 4),) * 2, "hx is a tuple, but it has to be one tensor, h_0")
    )
    with pytest.raises(bn.BatchNormError, match=sentence):
        layer(x, hx)


@KINDS
def test_bad_cell_calls(kind):
    cell = CELLS[kind](3, 4)
    state = cell(torch.zeros(5, 3))
    for call, sentence in (
        (lambda: cell(torch.zeros(5, 3), state), "does not say which step it is; pass step=0 at the beginning"),
        (lambda: cell(torch.zeros(5, 3), state, step=-1), "step is -1; count the steps from 0"),
        (lambda: cell(torch.zeros(5, 2)), "the input has 2 features"),
        (lambda: cell(torch.zeros(7, 5, 3)), r"got shape \[7, 5, 3\]; give it one time step at a time"),
        (lambda: cell(torch.zeros(6, 3), state, step=1), r"h_0 has shape \[5, 4\], but .* \[6, 4\]"),
    ):
        with pytest.raises(bn.BatchNormError, match=f"BatchNorm{kind}Cell: .*{sentence}"):
            call()


def test_bad_steps():
    with pytest.raises(bn.BatchNormError, match=r"StepBatchNorm: expected 2D input \(got 3D"):
        StepBatchNorm(3)(torch.zeros(2, 3, 4))
    norm = StepBatchNorm(3)
    with pytest.raises(bn.BatchNormError, match="statistics is 'none'"):
        norm.statistics = "none"


@KINDS
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "state_dict"])
def test_copies(kind, way):
    layer = randomise(LAYERS[kind](3, 4, 2, bidirectional=True, max_length=8, statistics="batch"))
    x = torch.randn(6, 5, 3)
    layer(x)
    if way == "deepcopy":
        other = copy.deepcopy(layer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif way == "save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = LAYERS[kind](3, 4, 2, bidirectional=True, max_length=8)
        assert other.load_state_dict(layer.state_dict()) == ([], [])
    names = [name for name, _ in layer.named_children()]
    assert [name for name, _ in other.named_children()] == names
    for mode in (True, False):
        expected, last = layer.train(mode)(x)
        result, other_last = other.train(mode)(x)
        if way != "state_dict" or mode:  # statistics="batch" is not part of a state
            assert torch.equal(result, expected)
            assert all(map(torch.equal, tuple_of(other_last), tuple_of(last)))
    for a, b in zip(other.buffers(), layer.buffers(), strict=True):
        assert torch.equal(a, b)


@KINDS
def test_reset(kind):
    layer = randomise(LAYERS[kind](3, 4, gamma=0.2))
    weight = layer.weight_ih_l0.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight_ih_l0, weight)
    for norm in layer.children():
        assert torch.all(norm.weight == 0.2)
        assert not norm.running_mean.any()
        assert torch.all(norm.running_var == 1)
        assert not norm.num_batches_tracked.any()


@KINDS
@pytest.mark.parametrize("batch", ["dense", "packed"])
def test_bfloat16(kind, batch, path):
    layer = randomise(LAYERS[kind](8, 24, bidirectional=True))
    half = copy.deepcopy(layer).bfloat16()
    layer = copy.deepcopy(half).float()
    sequences = [s.bfloat16() for s in sequences_of([6, 5, 5, 3] * 6, 8)]
    for mode in (True, False):
        results = []
        for module, dtype in ((layer, torch.float32), (half, torch.bfloat16)):
            cast = [s[: 3 if batch == "dense" else None].to(dtype) for s in sequences]
            output, last = module.train(mode)(packed(cast) if batch == "packed" else torch.stack(cast, 1))
            output = output.data if batch == "packed" else output
            results.append([output, *tuple_of(last)])
            output.sum().backward()
        for actual, expected in zip(results[1], results[0], strict=True):
            assert actual.dtype == torch.bfloat16
            torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)
            assert (actual.float() - expected).abs().mean() < 0.01
    assert half.norm_hh_l0.running_mean.dtype == torch.bfloat16
    assert torch.isfinite(half.weight_hh_l0.grad).all()


@KINDS
def test_autocast(kind, path):
    layer = LAYERS[kind](8, 24, 2)
    x = torch.randn(5, 6, 8)
    expected = copy.deepcopy(layer)(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)[0]
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)
    result.sum().backward()
    assert layer.norm_hh_l1.running_mean.dtype == layer.weight_ih_l0.grad.dtype == torch.float32


SLOW = [("LSTM", False, True), ("GRU", True, True)]


@pytest.mark.parametrize(
    ("kind", "mode", "both"),
    [("LSTM", True, False), ("GRU", False, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled(kind, mode, both):
    torch._dynamo.reset()
    layer = randomise(LAYERS[kind](8, 24, bidirectional=both, max_length=2)).train(mode)
    twin, x = copy.deepcopy(layer), torch.randn(3, 6, 8)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager" if both else "eager")
    for _ in range(2):
        expected, result = layer(x), compiled(x)
        for a, b in zip([result[0], *tuple_of(result[1])], [expected[0], *tuple_of(expected[1])], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(twin.buffers(), layer.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(y[0].sum(), m.weight_hh_l0)[0] for y, m in ((expected, layer), (result, twin))]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@KINDS
def test_one_node_of_an_fx_graph(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = LAYERS[kind](3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = Model(), torch.randn(5, 6, 3)
    traced = torch.fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["rnn", "head"]
    torch.testing.assert_close(traced(x), model(x))


@KINDS
def test_empty_batch_in_evaluation(kind):
    output, last = LAYERS[kind](3, 4, bidirectional=True).eval()(torch.zeros(7, 0, 3))
    assert output.shape == (7, 0, 8)
    assert all(state.shape == (2, 0, 4) for state in tuple_of(last))


@KINDS
def test_remembers(kind):
    """The sign of the first value, after 12 steps of noise: by chance the loss is 0.69."""
    torch.manual_seed(1)
    layer, head = LAYERS[kind](1, 16, max_length=12), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)

    def batch():
        x = 0.3 * torch.randn(12, 64, 1)
        label = (torch.rand(64) < 0.5).float()
        x[0, :, 0] = 2 * label - 1
        return x, label

    def loss_of(x, label):
        return nn.functional.binary_cross_entropy_with_logits(head(layer(x)[0][-1]).squeeze(1), label)

    for _ in range(120):
        optimizer.zero_grad()
        loss_of(*batch()).backward()
        optimizer.step()
    layer.eval()
    with torch.no_grad():
        assert loss_of(*batch()) < 0.1
        assert layer(batch()[0].repeat(3, 1, 1))[0].isfinite().all()  # longer than any sequence of the training
