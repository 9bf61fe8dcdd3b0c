"""torch.compile sees the kernel in training if asked to, else torch's operators, as export and the tracers do."""

import copy

import pytest
import torch
from layer_cases import LAST, OURS, activate, example, pair, same, same_buffers
from torch.fx.experimental.proxy_tensor import make_fx

import batchnorm as bn
from batchnorm.kernels import graph_op

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
# What torch itself says while it compiles or traces is not ours to answer for.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Two layers: a fused one with a residual, and a plain one."""

    def __init__(self):
        super().__init__()
        self.first = bn.BatchNorm2d(24, activation="relu")
        self.second = bn.BatchNorm2d(24)

    def forward(self, x):
        return self.second(self.first(x, residual=x))


def compare_with_eager(model, backend, steps=2, dynamic=None):
    eager, compiled = model, copy.deepcopy(model)
    function = torch.compile(compiled, fullgraph=True, backend=backend, dynamic=dynamic)
    for i in range(steps):
        x = example(2, shape=(6 + i * bool(dynamic), 24, 5, 7))
        dy = torch.randn_like(x)
        results = []
        for run, parameters in ((eager, eager.parameters()), (function, compiled.parameters())):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            results.append([y, *torch.autograd.grad(y, [leaf, *parameters], dy)])
        for actual, expected in zip(results[1], results[0], strict=True):
            same(actual, expected, 1e-4)
    for (name, actual), (_, expected) in zip(compiled.named_buffers(), eager.named_buffers(), strict=True):
        assert "num_batches" not in name or int(expected) == (steps if model.training else 0)
        same(actual, expected)


@MODES
def test_compiled_by_inductor(mode):
    compare_with_eager(Model().train(mode), "inductor")


@pytest.mark.parametrize("mode", [pytest.param(True, marks=pytest.mark.slow), False], ids=["train", "eval"])
def test_compiled_by_aot_eager_with_any_batch_size(mode):
    compare_with_eager(Model().train(mode), "aot_eager", steps=3, dynamic=True)


@pytest.mark.parametrize("activation", ["relu6", "leaky_relu", "silu"])
def test_compiled_activations(activation):
    layer = bn.BatchNorm2d(24, activation=activation, negative_slope=0.2)
    compare_with_eager(layer, "aot_eager")


@pytest.mark.parametrize("switches", [{"statistics": "running", "update": True}, {"statistics": "batch"}], ids=str)
@MODES
def test_compiled_switches(switches, mode):
    eager = bn.BatchNorm2d(24, **switches).train(mode)
    compiled = copy.deepcopy(eager)
    x = example(2)
    same(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), eager(x))
    same_buffers(compiled, eager)
    assert int(eager.num_batches_tracked) == int(mode or "update" in switches)


def test_compiled_layer_keeps_a_non_finite_batch_out():
    layer = bn.BatchNorm2d(24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(example(2))
    before = copy.deepcopy(layer.state_dict())
    compiled(example(2) / 0)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    compiled(example(2))
    assert int(layer.num_batches_tracked) == 2


def test_compiled_in_channels_last():
    layer = bn.BatchNorm2d(24, activation="relu")
    x = example(2, last=True)
    y = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")(x)
    assert y.is_contiguous(memory_format=LAST[2])
    same(y, layer(x))


def test_compiled_function():
    mean, var, x = torch.zeros(24), torch.ones(24), example(2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x, mean, var):
        return bn.functional.batch_norm(x, mean, var, training=True, activation="silu", residual=x)

    y = run(x, mean, var)
    stock = torch.nn.BatchNorm2d(24, affine=False)
    same(y, activate(stock(x) + x, "silu"))
    same(mean, stock.running_mean)
    same(var, stock.running_var)


@MODES
@pytest.mark.parametrize("chosen", [True, False])
def test_compiled_code_calls_the_kernel_in_training_if_asked_to(mode, chosen, kernel_calls, monkeypatch):
    monkeypatch.setattr(graph_op, "CHOSEN", chosen)
    torch.compile(OURS[2](24).train(mode), fullgraph=True, backend="aot_eager")(example(2))
    assert len(kernel_calls) == (mode and chosen)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
def test_export_for_evaluation(strict):
    model = Model().train()
    model(example(2))
    model.eval()
    program = torch.export.export(model, (example(2),), strict=strict)
    x = example(2)
    same(program.module()(x), model(x))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("batch_norm" in target for target in targets)
    assert not any("copy_" in target for target in targets)


def test_export_with_any_batch_size():
    model = Model().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (example(2),), dynamic_shapes=({0: batch},))
    x = example(2, shape=(17, 24, 5, 7))
    same(program.module()(x), model(x))


def test_export_for_training_carries_the_update():
    model = Model().train()
    program = torch.export.export(copy.deepcopy(model), (example(2),))
    program = program.run_decompositions({})
    assert set(program.graph_signature.buffers_to_mutate.values()) == set(dict(model.named_buffers()))
    module, x = program.module(), example(2)
    same(module(x), model(x))
    same(module.get_buffer("first.running_mean"), model.first.running_mean)
    assert int(module.get_buffer("second.num_batches_tracked")) == 1


@MODES
def test_make_fx(mode, path):
    layer, twin = OURS[2](24, activation="relu").train(mode), OURS[2](24, activation="relu").train(mode)
    x = example(2)
    buffers = [b.clone() for b in layer.buffers()]
    graph = make_fx(lambda x: layer(x))(x)
    for buffer, value in zip(layer.buffers(), buffers, strict=True):
        buffer.copy_(value)
    assert any("batch_norm" in str(node.target) for node in graph.graph.nodes)
    same(graph(x), twin(x).detach())
    same_buffers(layer, twin)


def test_jit_trace_in_evaluation(path, recwarn):
    _, layer = pair(2)
    layer.eval().activation = "relu"
    traced = torch.jit.trace(layer, example(2))
    x = example(2, shape=(3, 24, 4, 4))
    same(traced(x), layer(x))
    assert not [w for w in recwarn if issubclass(w.category, torch.jit.TracerWarning)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch's own check of the batch size
def test_jit_trace_in_training(path):
    stock, ours = pair(2)
    x = example(2)
    traced = [torch.jit.trace(layer, x) for layer in (stock, ours)]
    same(traced[1](x), traced[0](x))
    same_buffers(ours, stock)
