"""The short way to the kernel: the same bits as the long one, taken by what is plain and by nothing else."""

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from kernel_compiler import SOURCE, compile_c, compiler
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.functional import batch_norm, normalize
from batchnorm.kernels import call
from batchnorm.layers.batch import _Fast

pytestmark = pytest.mark.skipif(
    kernels.kernel() is None or call.short is None, reason=f"no short way: {kernels.describe()}"
)

SHAPES = {
    "rows": (32, 64),
    "few rows": (3, 40),
    "sequence": (5, 24, 33),
    "images": (4, 17, 9, 7),
    "images, channels last": (4, 32, 5, 6),
    "one sample": (1, 32, 5, 5),
    "volumes": (2, 16, 3, 4, 5),
    "volumes, channels last": (2, 48, 3, 2, 4),
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tensor(name, dtype=torch.float32):
    shape = SHAPES[name]
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=FORMATS[len(shape)]) if "channels last" in name else x


def short(y):
    """Whether the way back begins in C."""
    return type(y.grad_fn).__name__ == "_PlainBackward"


def results(layer, x, residual, dy, monkeypatch, way):
    """Everything that a step gives and changes, the short way ("c") or the long one ("python")."""
    layer.reset_running_stats()
    with monkeypatch.context() as patch:
        if way == "python":
            patch.setattr(call, "short", None)
        versions = [buffer._version for buffer in layer.buffers()]
        y = layer(x, residual)
        versions = [buffer._version - before for buffer, before in zip(layer.buffers(), versions, strict=True)]
        assert short(y) == (way == "c")
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
                layer = _Fast(channels, affine=affine, activation=activation).train(training)
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


def call_with(x, **changes):
    arguments = {"running_mean": torch.zeros(64), "running_var": torch.ones(64), "training": True, **changes}
    return batch_norm(x.requires_grad_(), **arguments)


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


@pytest.mark.parametrize("kind", DECLINED)
def test_python_serves_what_is_not_plain(kind):
    assert type(DECLINED[kind]().grad_fn).__name__ == "NativeBackward"
    assert short(call_with(tensor("rows")))


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_training_that_is_no_bool_means_what_it_means_in_python(monkeypatch, value):
    mean = torch.full((64,), 3.0)
    arguments = tensor("rows"), mean, torch.ones(64), None, None, value, 0.0, 1e-5, None, None, 0.0
    y, _ = normalize(*arguments)
    monkeypatch.setattr(call, "short", None)
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


# ---- the way back ------------------------------------------------------------------------------------------


def step(way, monkeypatch, backward, residual=True, activation="relu"):
    torch.manual_seed(1)
    layer = bn.BatchNorm2d(32, activation=activation)
    x, r = (torch.randn(4, 32, 5, 5, requires_grad=True) for _ in range(2))
    with monkeypatch.context() as patch:
        if way == "python":
            patch.setattr(call, "short", None)
        y = layer(x, r if residual else None)
        assert short(y) == (way == "c")
    return backward(y, [x, layer.weight, layer.bias, *([r] if residual else [])])


def twice(y, inputs):
    first = torch.autograd.grad(y, inputs, torch.cos(y.detach()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, materialize_grads=True)
    return (*first, *second)


BACKWARDS = {
    "expanded gradient": lambda y, inputs: torch.autograd.grad(y.sum(), inputs),
    "gradient of another layout": lambda y, inputs: torch.autograd.grad(
        y, inputs, torch.cos(y.detach()).contiguous(memory_format=torch.channels_last)
    ),
    "twice": twice,
    "the same graph twice": lambda y, inputs: (
        *torch.autograd.grad(y, inputs, torch.cos(y.detach()), retain_graph=True),
        *torch.autograd.grad(y, inputs, torch.cos(y.detach())),
    ),
    "a batch of gradients": lambda y, inputs: torch.autograd.grad(
        y, inputs, torch.stack([torch.cos(y.detach()), torch.ones_like(y)]), is_grads_batched=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", BACKWARDS)
def test_every_way_back(monkeypatch, kind, residual, activation):
    ours, theirs = (step(way, monkeypatch, BACKWARDS[kind], residual, activation) for way in ("c", "python"))
    assert len(ours) == len(theirs) > 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


HOOKS = {
    "other strides": lambda t: t.double().to(t.dtype).permute(*reversed(range(t.dim()))).contiguous().permute(
        *reversed(range(t.dim()))
    ),
    "another dtype": lambda t: t.double(),
    "a copy": lambda t: t.clone(),
}  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_saved_tensors(monkeypatch, kind, activation):
    def give(y, inputs):
        return torch.autograd.grad(y, inputs, torch.cos(y.detach()))

    def packed(way):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (HOOKS[kind](t), t.dtype), lambda p: p[0].to(p[1])):
            return step(way, monkeypatch, give, activation=activation)

    ours, theirs = packed("c"), packed("python")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["dense", "expanded gradient"])
def test_checkpointing_gives_saved_tensors_out_once(kind, reentrant):
    def give(run):
        torch.manual_seed(1)
        layer = bn.BatchNorm1d(64, activation="relu")
        x = torch.randn(32, 64, requires_grad=True)
        y = run(layer, x)
        y.backward(torch.cos(y.detach()) if kind == "dense" else torch.ones(()).expand_as(y))
        return x.grad, layer.weight.grad, layer.bias.grad

    ours = give(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(ours, give(lambda layer, x: layer(x)), strict=True))


def test_a_graph_that_is_gone_and_an_input_that_has_changed():
    layer = bn.BatchNorm1d(64)
    x = tensor("rows").requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(torch.ones_like(y))
    y = layer(x)
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


# ---- the memory --------------------------------------------------------------------------------------------


def test_gradients_begin_at_a_cache_line_and_outlive_their_graph():
    x, dy = (torch.randn(64, 96, 11, requires_grad=grad) for grad in (True, False))
    layer = bn.BatchNorm1d(96, activation="relu")
    dx, dweight = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    assert dx.data_ptr() % 64 == dweight.data_ptr() % 64 == 0
    kept, expected = dx[3:5], dx[3:5].clone()
    del dx, layer, x
    gc.collect()
    for _ in range(20):
        torch.full((64, 96, 11), 7.0)
    assert torch.equal(kept, expected)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks Linux how much memory there is")
def test_nothing_is_left_behind():
    x, r, dy = (torch.randn(64, 64, 64, requires_grad=grad) for grad in (True, True, False))  # 1 MB
    layer = bn.BatchNorm1d(64, activation="relu")

    def steps(count):
        for _ in range(count):
            torch.autograd.grad(layer(x, r), [x, r, layer.weight, layer.bias], dy)
            torch.autograd.grad(layer(x, r).sum(), [x, r])
            with torch.no_grad():
                layer(x)

    def megabytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    steps(5)
    gc.collect()
    counted = [layer.weight, layer.running_mean, x, r, dy, call.differentiable.gradients, torch.float32]
    before, references = megabytes(), [sys.getrefcount(thing) for thing in counted]
    objects = len(gc.get_objects())
    steps(100)
    gc.collect()
    assert megabytes() - before < 40  # one tensor left behind a step would be 100
    assert [sys.getrefcount(thing) for thing in counted] == references
    assert abs(len(gc.get_objects()) - objects) < 50


# ---- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "error"), [(-1, MemoryError), (-2, BatchNormError)])
def test_what_the_kernel_refuses_is_said_in_pythons_words(monkeypatch, code, error):
    refuse = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda arguments: code)

    class Run:
        address = ctypes.cast(refuse, ctypes.c_void_p).value

    monkeypatch.setattr(kernels, "_kernel", bn.kernels.native.Kernel(Run(), kernels.kernel().library, ""))
    for x in (tensor("rows"), tensor("rows").requires_grad_()):
        with pytest.raises(error, match=r"\[32, 64\]"):
            batch_norm(x, None, None, training=True)


def test_a_kernel_without_an_address_is_called_from_python(monkeypatch):
    kernel = kernels.kernel()
    monkeypatch.setattr(kernels, "_kernel", bn.kernels.native.Kernel(lambda a: kernel.run(a), kernel.library, ""))
    assert not short(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


def test_arguments_of_another_kind():
    from batchnorm.kernels import _call

    with pytest.raises(TypeError, match="12 arguments"):
        _call.normalize(1)
    with pytest.raises(TypeError, match="what normalize gives it"):
        _call.forward(1)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        _call.forward(1, 2, 3, 4, 5, 6)
    with pytest.raises(TypeError, match="a layer, an input and a residual"):
        _call.layer(1)
    with pytest.raises(TypeError, match="a ctx and a gradient"):
        _call.backward()
    with pytest.raises(TypeError, match="setup needs Tensor"):
        _call.setup(anything=1)
    assert short(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


@pytest.mark.parametrize("fact", ["abi", "needs"])
def test_a_build_of_another_version_is_not_used(monkeypatch, fact):
    from batchnorm.kernels import _call

    monkeypatch.setattr(_call, fact, {"abi": 1, "needs": ("Tensor", "oracle")}[fact])
    expected = "called from Python: the compiled call.c belongs to another version of batchnorm; reinstall it"
    assert call.load() == (None, expected)


class Functions(ctypes.Structure):
    """DLPack's functions, as far as their version."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("rest", ctypes.c_void_p * 6)]


def test_another_version_of_dlpack_is_not_used(monkeypatch):
    functions = Functions(2, 5)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(ctypes.addressof(functions), b"dlpack_exchange_api", None)
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
    assert call.load() == (None, f"called from Python: torch {torch.__version__} offers DLPack 2.5, and not 1")
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert call.load() == (None, f"called from Python: torch {torch.__version__} does not offer DLPack's functions")
    assert short(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


TELL = """
import json, torch
from batchnorm import kernels
from batchnorm.functional import batch_norm
y = batch_norm(torch.randn(32, 64, requires_grad=True), None, None, training=True)
print(json.dumps([kernels.describe(), type(y.grad_fn).__name__]))
"""


@pytest.mark.parametrize(("switch", "told", "name"), [
    ("python", "; called from Python, as BATCHNORM_CALL=python asks", "NativeBackward"),
    ("", "threads", "_PlainBackward"),
])  # fmt: skip
def test_the_switch(switch, told, name):
    done = subprocess.run(
        [sys.executable, "-c", TELL], env={**os.environ, "BATCHNORM_CALL": switch}, capture_output=True, text=True
    )
    described, function = json.loads(done.stdout)
    assert described.endswith(told)
    assert function == name


ONLY_THE_KERNEL = """#!/bin/sh
# A compiler that knows no Python: it makes empty files, but not of call.c.
case "$*" in *call.c*) echo "Python.h: no such file" >&2; exit 1;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
exit 0
"""


def test_without_pythons_headers_the_kernel_is_built_alone(tmp_path):
    pytest.importorskip("setuptools.command.bdist_wheel")
    root = Path(__file__).parents[2]
    compiler = tmp_path / "cc"
    compiler.write_text(ONLY_THE_KERNEL)
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"],
        cwd=root,
        env={**os.environ, "CC": str(compiler), "LDSHARED": f"{compiler} -shared"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "batchnorm: the short way to the C kernel could not be built (are Python's headers there?)" in done.stdout
    assert [path.name for path in (tmp_path / "lib").rglob("*.so")] == ["_bn.so"]


@pytest.mark.slow
def test_the_sanitizers_find_nothing(tmp_path):
    """All of this again, with call.c under AddressSanitizer and UBSan, in a copy of the package."""
    package = shutil.copytree(SOURCE.parent, tmp_path / "batchnorm", ignore=shutil.ignore_patterns("__pycache__"))
    compile_c(
        SOURCE / "call.c",
        package / "kernels" / "_call.abi3.so",
        *("-shared", "-fPIC", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        f"-I{sysconfig.get_paths()['include']}",
    )
    runtimes = [
        subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("the sanitizers' runtimes are not installed")
    environment = {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not left_behind",
         __file__, Path(__file__).with_name("test_call_layers.py")],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
