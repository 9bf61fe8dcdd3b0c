"""Plain calls in C: the same bits as through Python, and used for plain calls only."""

import platform
import subprocess
import sys

import pytest
import torch
from call_cases import NONE, SHAPES, WHY, call_with, ran_in_c, tensor
from torch.utils._python_dispatch import TorchDispatchMode

import batchnorm as bn
from batchnorm.errors import BatchNormError
from batchnorm.functional import batch_norm, normalize
from batchnorm.kernels import call
from batchnorm.layers.batch import _BatchNormBase

pytestmark = pytest.mark.skipif(NONE, reason=WHY)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def results(layer, x, residual, dy, monkeypatch, way):
    """Everything that a step gives and changes, called from C ("c") or from Python ("python")."""
    layer.reset_running_stats()
    with monkeypatch.context() as patch:
        if way == "python":
            patch.setattr(call, "compiled", None)
        versions = [buffer._version for buffer in layer.buffers()]
        y = layer(x, residual)
        versions = [buffer._version - before for buffer, before in zip(layer.buffers(), versions, strict=True)]
        assert ran_in_c(y) == (way == "c")
        wanted = [t for t in (x, residual, *layer.parameters()) if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(y, wanted, dy)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    places = [(t.shape, t.stride(), t.dtype) for t in (y, *gradients)]
    return (y, *gradients, *state.values()), (versions, places)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_ways_give_the_same_bits(monkeypatch, name, dtype, training):
    channels = SHAPES[name][1]
    for activation in (None, "relu", "relu6", "leaky_relu", "silu"):
        for residual in (None, tensor(name, dtype).requires_grad_()):
            for affine in (True, False):
                layer = _BatchNormBase(channels, affine=affine, activation=activation).train(training)
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.normal_()
                x, dy = tensor(name, dtype).requires_grad_(), tensor(name, dtype)
                ours, facts = results(layer, x, residual, dy, monkeypatch, "c")
                theirs, expected = results(layer, x, residual, dy, monkeypatch, "python")
                assert facts == expected
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (activation, affine)


@pytest.mark.parametrize(
    "frozen", [("x",), ("weight",), ("bias",), ("residual",), ("x", "residual"), ("weight", "bias")]
)
def test_only_the_gradients_that_are_wanted(monkeypatch, frozen):
    layer = bn.BatchNorm1d(64, activation="relu")
    tensors = {"x": tensor("rows"), "residual": tensor("rows"), "weight": layer.weight, "bias": layer.bias}
    for name, t in tensors.items():
        t.requires_grad_(name not in frozen)
    pair = [
        results(layer, tensors["x"], tensors["residual"], torch.ones(32, 64), monkeypatch, way)
        for way in ("c", "python")
    ]
    assert all(torch.equal(a, b) for a, b in zip(pair[0][0], pair[1][0], strict=True))
    y = layer(tensors["x"], tensors["residual"])
    y.backward(torch.ones_like(y))
    assert {name for name, t in tensors.items() if t.grad is None} == set(frozen)


DECLINED = {
    "a mask": lambda: call_with(torch.randn(8, 64, 20), mask=torch.full((8,), 19)),
    "groups": lambda: call_with(tensor("rows"), groups=2),
    "gaps between rows": lambda: call_with(torch.randn(32, 128)[:, :64].detach()),
    "a transposed image": lambda: call_with(torch.randn(4, 64, 5, 6).transpose(2, 3)),
    "a residual with other strides": lambda: call_with(
        torch.randn(4, 64, 5, 5), residual=torch.randn(4, 64, 5, 5).to(memory_format=torch.channels_last)
    ),
    "parameters of bfloat16": lambda: call_with(
        torch.randn(32, 64).bfloat16(), weight=torch.ones(64, dtype=torch.bfloat16)
    ),
    "a parameter with gaps": lambda: call_with(tensor("rows"), weight=torch.ones(128)[::2]),
}  # fmt: skip


def test_torch_serves_a_slope_that_is_not_the_kernels():
    x = tensor("rows").requires_grad_()
    y = call_with(x, activation="leaky_relu", negative_slope=-0.5)
    assert type(y.grad_fn).__name__ not in ("PlainBackward", "NativeBackward")
    normal = torch.nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(y, torch.nn.functional.leaky_relu(normal, -0.5), rtol=1e-5, atol=1e-5)


WRONG = {
    "a residual with fewer samples": {"residual": torch.zeros(16, 64)},
    "a residual with fewer dimensions": {"residual": torch.zeros(64)},
    "a residual with more dimensions": {"residual": torch.zeros(32, 64, 1)},
    "a mean without a variance": {"running_var": None},
    "an eps of 0": {"eps": 0.0},
    "an activation that is no name": {"activation": ["relu"]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_pythons_to_say(kind, monkeypatch):
    def problem():
        with pytest.raises((BatchNormError, TypeError, ValueError)) as raised:
            call_with(tensor("rows"), **WRONG[kind])
        return type(raised.value), str(raised.value)

    ours = problem()
    monkeypatch.setattr(call, "compiled", None)
    assert ours == problem()


@pytest.mark.parametrize("shape", [(2, 8), (3, 12), (2, 16), (4, 3, 4), (2, 5, 3), (3, 4, 2, 2), (2, 1, 4, 4)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_small_batches_are_right_whoever_serves_them(shape, count):
    x = torch.randn(shape[0] * count, *shape[1:])
    y = batch_norm(x, None, None, training=True)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, None, None, training=True), rtol=1e-4, atol=1e-4)


def test_a_count_without_statistics_does_not_count():
    count = torch.tensor(3)
    normalize(tensor("rows"), None, None, None, None, True, 0.1, 1e-5, None, None, 0.0, batches=count)
    assert int(count) == 3


class Seen(TorchDispatchMode):
    """Writes down the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_looks_at_operators_sees_torchs():
    layer, x = bn.BatchNorm1d(64), tensor("rows").requires_grad_()
    with Seen() as there:
        y = layer(x)
    assert any("batch_norm" in name for name in there.names)
    y = layer(x)
    assert ran_in_c(y)
    with Seen() as back:
        y.backward(torch.ones_like(y))
    assert any("empty" in name for name in back.names)


def test_a_traced_layer_is_no_constant():
    layer = bn.BatchNorm1d(64).eval()
    traced = torch.jit.trace(layer, tensor("rows"))
    x = tensor("rows")
    torch.testing.assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)


def test_tensors_without_memory():
    zeros, rows = torch._efficientzerotensor((32, 64)), tensor("rows")
    for layer in (bn.BatchNorm1d(64), bn.BatchNorm1d(64, activation="relu").eval()):
        torch.testing.assert_close(layer(zeros), layer(torch.zeros(32, 64)))
        torch.testing.assert_close(layer(rows, zeros), layer(rows, torch.zeros(32, 64)), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's own, from within
def test_compiled_autograd():
    layer, x = bn.BatchNorm1d(64, activation="relu"), tensor("rows").requires_grad_()
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    loss = layer(x).square().sum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda loss: loss.backward(), backend="eager")(loss)
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", DECLINED)
def test_python_serves_what_is_not_plain(kind):
    assert type(DECLINED[kind]().grad_fn).__name__ == "NativeBackward"
    assert ran_in_c(call_with(tensor("rows")))


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_training_that_is_no_bool_means_what_it_means_in_python(monkeypatch, value):
    mean = torch.full((64,), 3.0)
    arguments = tensor("rows"), mean, torch.ones(64), None, None, value, 0.0, 1e-5, None, None, 0.0
    y, _ = normalize(*arguments)
    monkeypatch.setattr(call, "compiled", None)
    assert torch.equal(y, normalize(*arguments)[0])
    assert (y.mean() < -2) == (not value)


class Traced(torch.Tensor):
    """A subclass, which may mean anything by its numbers."""


def test_a_subclass_is_not_plain():
    x = tensor("rows").as_subclass(Traced)
    assert isinstance(batch_norm(x, None, None, training=True), Traced)


def test_what_only_counts_is_counted_once():
    layer = bn.BatchNorm1d(64)
    for _ in range(3):
        layer(tensor("rows"))
    assert int(layer.num_batches_tracked) == 3
    layer.num_batches_tracked = torch.tensor(5.0)  # not the kernel's kind of number
    layer(tensor("rows"))
    assert float(layer.num_batches_tracked) == 6


def test_a_batch_that_is_not_finite(monkeypatch):
    layer = bn.BatchNorm1d(64, nonfinite="raise")
    x = tensor("rows")
    x[3, 5] = float("nan")
    with pytest.raises(bn.errors.NonFiniteBatch):
        layer(x)
    assert int(layer.num_batches_tracked) == 0
    assert torch.equal(layer.running_mean, torch.zeros(64))
    assert layer.running_mean._version == bn.BatchNorm1d(64).running_mean._version


# A free piece of the heap between pieces in use, with just the room that torch's output of 42 MB takes: do torch's and
# ours come there? (With M_MMAP_MAX 0 malloc makes a large piece in the heap; else it is mapped.) What small pieces the
# calls need, they have had before.
PIECE = """
import ctypes, torch
import batchnorm as bn

library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
M_MMAP_MAX = -4
torch.set_grad_enabled(False)
x = torch.zeros(160, 256, 16, 16)
layers = torch.nn.BatchNorm2d(256).eval(), bn.BatchNorm2d(256).eval()
for _ in range(3):
    [layer(x) for layer in layers]
library.mallopt(M_MMAP_MAX, 0)
piece, behind = library.malloc(4 * x.numel() + 128), library.malloc(1000000)
library.mallopt(M_MMAP_MAX, 65536)
assert behind > piece
for layer in layers:
    library.free(piece)
    y = layer(x)
    print(0 <= y.data_ptr() - piece < 128)
    del y
    piece = library.malloc(4 * x.numel() + 128)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's heap")
def test_output_fits_where_torchs_fits():
    done = subprocess.run([sys.executable, "-c", PIECE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
