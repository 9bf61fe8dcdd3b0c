"""The kernel's operators for compiled graphs: against reference.py, in graphs of their own, and where they stay out."""

import copy
import itertools
import os
import subprocess
import sys
from collections import Counter

import kernel_cases
import pytest
import statistics_cases
import torch
from functorch.compile import make_boxed_func
from kernel_cases import ACTIVATIONS, LAYOUTS, TOLERANCE, Case, differences, odd_shapes, threads
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

import batchnorm as bn
from batchnorm import functional, kernels
from batchnorm.errors import BatchNormError
from batchnorm.kernels import call as kernel_call
from batchnorm.kernels import graph_op

TRAIN = getattr(torch.ops.batchnorm.train, graph_op.OVERLOAD)
BACKWARD = getattr(torch.ops.batchnorm.train_backward, graph_op.OVERLOAD)
DTYPES = (torch.float32, torch.bfloat16)
pytestmark = [
    pytest.mark.skipif(kernels.kernel() is None, reason=f"no compiled kernel: {kernels.describe()}"),
    # What torch itself says while it compiles is not ours to answer for.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(graph_op, "CHOSEN", True)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- the operators by themselves, as a graph calls them -------------------------------------------------------------


@pytest.fixture
def _on_operators(monkeypatch):
    """Send what `batch_norm` is given to the operators, without a compiler."""
    monkeypatch.setattr(kernel_call, "compiled", None)
    monkeypatch.setattr(functional, "_serves", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(graph_op, "ENOUGH", 0)
    with threads(2):
        yield


def wrong(case):
    tensors = kernel_cases.inputs(case)
    on_operator = torch.Size(case.shape[1:]).numel() >= 16
    assert ("batchnorm_train" in type(kernel_cases.call(case, tensors).grad_fn).__name__) == on_operator, case
    tolerance = TOLERANCE["native" if on_operator else "torch", case.dtype]
    return differences(case, kernel_cases.run(case, tensors), tolerance)


@pytest.mark.usefixtures("_on_operators")
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("positions", [1, 2, 7, 16, 49])
def test_odd_shapes(positions, layout):
    cases = [case for case in odd_shapes(positions, layout) if case.training]
    found = [sentence for case in cases for sentence in wrong(case)]
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("_on_operators")
@pytest.mark.parametrize("shape", [(34, 19), (7, 18, 17), (5, 17, 6, 5), (4, 16, 3, 4, 2), (6, 3, 5, 4)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(shape, layout):
    found = []
    for i, (gradient, activation) in enumerate(itertools.product(LAYOUTS, ("silu", "relu"))):
        if gradient != "expanded" or activation == "silu":
            found += wrong(Case(shape, layout, DTYPES[i % 2], activation, i % 3 != 0, gradient_layout=gradient, seed=i))
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("_on_operators")
@pytest.mark.parametrize("mask", [None, "random", "lengths"])
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_masks_and_groups(mask, layout, monkeypatch):
    monkeypatch.setattr(statistics_cases, "took_native", lambda y: "batchnorm_train" in type(y.grad_fn).__name__)
    found = []
    for i, (shape, activation) in enumerate(itertools.product(statistics_cases.SHAPES, ACTIVATIONS)):
        groups = (1, 2, 3)[i % 3]
        case = statistics_cases.Case(
            shape, mask, groups, layout, DTYPES[i % 2], activation, i % 2 == 0, i % 4 != 0, seed=i
        )
        if torch.Size(shape[1:]).numel() >= 16:
            found += statistics_cases.wrong(case, "native")
    assert not found, "\n".join(found)


def arguments(shape=(6, 20, 5, 7), last=False, activation="relu", residual=True, mask=False, groups=1, dtype=None):
    x = torch.randn(shape, dtype=dtype)
    r = torch.randn(shape, dtype=dtype) if residual else None
    if last:
        x, r = (t if t is None else t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, r))
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    marks = torch.rand(shape[0], *shape[2:]) > 0.3 if mask else None
    for t in (x, weight, bias, r):
        if t is not None:
            t.requires_grad_()
    return x, weight, bias, r, marks, groups, 1e-5, activation, 0.2 if activation == "leaky_relu" else 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"last": True, "activation": "leaky_relu"},
        {"activation": "silu", "groups": 2},
        {"activation": "none", "mask": True},
        {"residual": False, "dtype": torch.bfloat16},
        {"shape": (6, 20, 18), "mask": True, "groups": 3, "last": True, "activation": "relu6"},
        {"shape": (6, 3, 5, 7), "last": True},  # too few channels for rows of them
        {"shape": (19, 33)},
    ],
    ids=str,
)
def test_torchs_own_check(options):
    torch.library.opcheck(TRAIN, arguments(**options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "none", "silu"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_layout_may_change_between_the_passes(activation, residual):
    """As Inductor may do it: the notes of the forward pass are read in the order in which they were written."""
    given = arguments(activation=activation, residual=residual)
    x, weight, bias, r, mask, *numbers = given
    _, notes, _ = TRAIN(*(t.detach() if isinstance(t, torch.Tensor) else t for t in given))
    dy, again = torch.randn_like(x), r if activation == "silu" else None
    rest = weight, bias, notes, again, mask, residual, *numbers
    with torch.no_grad():
        expected = BACKWARD(dy, x, *rest)
        found = BACKWARD(dy, x.contiguous(memory_format=torch.channels_last), *rest)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_mask_that_leaves_too_little_is_refused_as_ever():
    x, *rest = arguments(residual=False)
    rest[3] = torch.zeros(6, 5, 7, dtype=torch.bool)
    with pytest.raises(BatchNormError, match="the mask leaves 0 of the 210 in the batch"):
        TRAIN(x, *rest)


def test_a_graph_that_meets_no_kernel_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "_kernel", None)
    with pytest.raises(BatchNormError, match="compiled for the native kernel"):
        TRAIN(*arguments())


# ---- compiled -------------------------------------------------------------------------------------------------------


class Recorder:
    """A backend that counts the operators of the graphs behind autograd, and the graphs."""

    def __init__(self):
        self.forward, self.backward, self.graphs = Counter(), Counter(), 0

    def __call__(self, module, inputs):
        def count(into):
            def compiler(graph, _):
                into.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
                return make_boxed_func(graph.forward)

            return compiler

        self.graphs += 1
        return aot_autograd(fw_compiler=count(self.forward), bw_compiler=count(self.backward))(module, inputs)

    def ours(self):
        """How often each pass is in the graphs: (forward, backward)."""
        assert not [name for name in self.forward | self.backward if "batch_norm" in name]
        assert str(TRAIN) not in self.backward
        return self.forward[str(TRAIN)], self.backward[str(BACKWARD)]


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(20, 24, 3, bias=False)
        self.first = bn.BatchNorm2d(24, activation="relu", **options)
        self.second = bn.BatchNorm2d(24, **options)

    def forward(self, x):
        x = self.first(self.conv(x))
        return self.second(x, residual=x)


def steps(model, function, batches):
    """Outputs and gradients of training steps."""
    found = []
    for i, x in enumerate(batches):
        generator = torch.Generator().manual_seed(i)
        x = x.clone().requires_grad_()
        y = function(x)
        dy = torch.randn(y.shape, generator=generator).to(y.dtype)
        parameters = [p for p in model.parameters() if p.requires_grad]
        found += [y, *torch.autograd.grad(y, [x, *parameters], dy)]
    return found


def same_training(model, batches, tolerance=2e-5, **options):
    """Compile a copy of a model, train both, and compare everything; return how they were compiled."""
    twin = copy.deepcopy(model)
    options.setdefault("backend", Recorder())
    compiled = torch.compile(twin, fullgraph=True, **options)
    expected, found = steps(model, model, batches), steps(twin, compiled, batches)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    for (name, a), b in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    return options["backend"]


def batches(*sizes, shape=(20, 7, 9)):
    return [torch.randn(n, *shape) * 2 + 1 for n in sizes]


def test_a_network_is_one_graph_and_no_pass_is_repeated():
    recorder = same_training(Net(), batches(6, 6, 6))
    assert recorder.graphs == 1
    assert recorder.ours() == (2, 2)


@pytest.mark.parametrize("marked", [False, True])
def test_one_graph_serves_batches_of_all_sizes(marked):
    """Without convolutions, which have a size below which they do something else."""
    model = nn.Sequential(bn.BatchNorm2d(20, activation="relu"), bn.BatchNorm2d(20))
    given = batches(5, 8, 17, 40)
    with torch._dynamo.config.patch(error_on_recompile=True):
        if marked:
            function = torch.compile(copy.deepcopy(model), fullgraph=True, backend=Recorder())
            for x in given:
                torch._dynamo.mark_dynamic(x, 0)
                torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-4)
        else:
            same_training(model, given, dynamic=True)


@pytest.mark.parametrize("options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_layers_of_other_kinds(options):
    assert same_training(Net(**options), batches(6, 6)).ours() == (2, 2)


@pytest.mark.parametrize(
    ("switches", "ours"),
    [
        ({"statistics": "batch", "update": False}, 2),
        ({"statistics": "running", "update": True}, 2),  # the statistics only
        ({"statistics": "running"}, 2),
    ],
    ids=str,
)
def test_switches(switches, ours):
    model = Net(**switches)
    twin, recorder = copy.deepcopy(model), Recorder()
    compiled = torch.compile(twin, fullgraph=True, backend=recorder)
    for x in batches(6, 6):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    for a, b in zip(twin.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert recorder.forward[str(TRAIN)] == ours


def test_gamma_and_beta_that_do_not_learn():
    model = Net()
    model.first.learn = False
    assert same_training(model, batches(6)).ours() == (2, 2)


def test_evaluation_is_left_to_the_compiler():
    model, recorder = Net().eval(), Recorder()
    x = batches(6)[0]
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=recorder)(x), model(x))
    assert str(TRAIN) not in recorder.forward


@pytest.mark.parametrize(
    "make",
    [
        lambda: bn.GhostBatchNorm(20, 3, activation="relu"),
        lambda: bn.SplitBatchNorm(20, 2),
        lambda: bn.SyncBatchNorm(20, activation="silu"),  # of one process
        lambda: bn.BatchNorm3d(20, activation="leaky_relu", negative_slope=0.2),
    ],
    ids=["ghost", "split", "sync", "3d"],
)
def test_other_layers(make):
    layer = make()
    shape = (20, 3, 4, 2) if isinstance(layer, nn.BatchNorm3d) else (20, 7, 5)
    assert same_training(layer, batches(6, 8, shape=shape), dynamic=True).ours() == (1, 1)


def test_a_mask_in_a_graph():
    layer, recorder = bn.MaskedBatchNorm(20, activation="silu"), Recorder()
    twin, x, lengths = copy.deepcopy(layer), torch.randn(4, 20, 18), torch.tensor([18, 3, 7, 9])
    x[1, :, 3:] = torch.nan
    torch.testing.assert_close(torch.compile(twin, fullgraph=True, backend=recorder)(x, lengths), layer(x, lengths))
    torch.testing.assert_close(twin.running_var, layer.running_var)
    assert recorder.ours() == (1, 0)


def test_autocast():
    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x)

    model, recorder = Net(), Recorder()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=recorder)
    x = batches(6)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    found = function(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert recorder.ours() == (2, 2)


def test_a_non_finite_batch_is_kept_out():
    layer, recorder = bn.BatchNorm2d(20), Recorder()
    compiled = torch.compile(layer, fullgraph=True, backend=recorder)
    first, second = batches(6, 6)
    compiled(first)
    before = copy.deepcopy(layer.state_dict())
    second[0, 3, 2, 2] = torch.inf
    compiled(second)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert recorder.ours()[0] == 1


def test_compiled_autograd():
    model = Net()
    twin, recorder = copy.deepcopy(model), Recorder()
    compiled = torch.compile(twin, fullgraph=True, backend=recorder)
    x = batches(6)[0]
    model(x).square().sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: compiled(x).square().sum().backward(), backend="aot_eager")(x)
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_double_backward():
    """The compiled backward pass of these backends is autograd's own, which may be asked again."""
    for activation, residual in itertools.product(("none", "relu", "silu"), (False, True)):
        layer = bn.BatchNorm2d(20, activation=activation)
        x, results = batches(4)[0], []
        for run in (layer, torch.compile(copy.deepcopy(layer), fullgraph=True, backend="eager")):
            a, r = x.clone().requires_grad_(), (x * 0.3).requires_grad_()
            y = run(a, residual=r if residual else None)
            wanted = [a, r] if residual else [a]
            first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def normalized(x):
    return functional.batch_norm(x, None, None, training=True, activation="silu")


def tangent(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(normalized(forward_ad.make_dual(x, x.cos()))).tangent


@pytest.mark.parametrize(
    "function",
    [
        torch.func.grad(lambda x: normalized(x).square().sum()),
        lambda x: torch.func.grad(lambda x: normalized(x).square().sum())(x),
        lambda x: torch.func.vmap(normalized)(x.unflatten(0, (2, -1))),
        lambda x: torch.func.jvp(normalized, (x,), (x.sin(),))[1],
        tangent,
    ],
    ids=["grad", "grad inside", "vmap", "jvp", "dual numbers"],
)
def test_transforms_see_torchs_operators(function):
    x = batches(6)[0]
    found = torch.compile(function, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, function(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_exported_graphs_are_torchs(strict, mode):
    program = torch.export.export(Net().train(mode), (batches(6)[0],), strict=strict)
    for graph in (program, program.run_decompositions({})):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert not [name for name in targets if name.startswith("batchnorm.")]
        assert [name for name in targets if name.startswith("aten.")]


@pytest.mark.parametrize("why", ["float64", "no kernel", "negative slope", "few values", "a small matrix"])
def test_what_the_kernel_does_not_read_is_torchs(why, monkeypatch):
    recorder, x, layer = Recorder(), batches(6)[0], bn.BatchNorm2d(20, activation="leaky_relu")
    if why == "float64":
        x, layer = x.double(), layer.double()
    elif why == "no kernel":
        monkeypatch.setattr(kernels, "_kernel", None)
    elif why == "negative slope":
        layer.negative_slope = -0.5
    elif why == "few values":
        x, layer = x[:, :3, :1, :1], bn.BatchNorm2d(3)
    else:
        x, layer = torch.randn(100, 64), bn.BatchNorm1d(64)
    torch.testing.assert_close(
        torch.compile(copy.deepcopy(layer), fullgraph=True, backend=recorder)(x), layer(x), rtol=1e-4, atol=1e-5
    )
    assert str(TRAIN) not in recorder.forward


# ---- Inductor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_format", "options"),
    [
        (torch.contiguous_format, {}),
        pytest.param(torch.channels_last, {"dynamic": True}, marks=pytest.mark.slow),
        pytest.param(torch.contiguous_format, {"mode": "max-autotune"}, marks=pytest.mark.slow),
    ],
    ids=["contiguous", "channels_last", "max-autotune"],
)
def test_inductor(memory_format, options):
    """It gives convolutions channels_last, whatever the model has, and the operators follow."""
    model = Net().to(memory_format=memory_format)
    given = [x.contiguous(memory_format=memory_format) for x in batches(6, 8 if "dynamic" in options else 6)]
    same_training(model, given, 1e-4, backend="inductor", **options)
    assert torch.compile(model, **options)(given[0]).stride() == model(given[0]).stride()


CACHED = """
import torch, batchnorm as bn
from torch._dynamo.utils import counters
torch.manual_seed(0)
layer = bn.BatchNorm2d(20, activation="relu")
y = torch.compile(layer, fullgraph=True)(torch.randn(4, 20, 3, 5, requires_grad=True), residual=torch.ones(4, 20, 3, 5))
y.sum().backward()
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"], found["autograd_cache_bypass"])
"""


@pytest.mark.slow
def test_graphs_on_disk_serve_other_processes(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), graph_op.SWITCH: "kernel"}
    for expected in ("0 1 0", "1 0 0"):
        run = subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True, env=environment)
        assert run.stdout.strip() == expected, run.stderr
