"""Loading the kernel or doing without it, its description, the struct shared with C, and the threads."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from kernel_cases import large, path, threads, wrong
from kernel_compiler import SOURCE, compile_c

from batchnorm import kernels
from batchnorm.kernels import native

needs_kernel = pytest.mark.skipif(kernels.kernel() is None, reason=f"no compiled kernel: {kernels.describe()}")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv(native.SWITCH_ISA, raising=False)


@pytest.fixture
def copy(tmp_path):
    """A second copy of the library: what is done to it does not touch the one in use."""
    return shutil.copy(native.LIBRARY, tmp_path / "copy.so")


def in_a_new_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- loading -----------------------------------------------------------------------------------------------


@needs_kernel
def test_the_installed_kernel_is_in_use():
    assert kernels.kernel() is not None
    assert kernels.describe() == f"native kernel ({kernels.kernel().isa}), on torch's own threads"


def test_the_switch_sends_everything_to_torch():
    printed = in_a_new_process(
        """
import json, torch
from batchnorm import kernels
from batchnorm.functional import batch_norm
x = torch.randn(8, 32, 5, 5, requires_grad=True)
y = batch_norm(x, None, None, training=True, activation="relu")
print(json.dumps([kernels.kernel() is None, kernels.describe(), type(y.grad_fn).__name__]))
""",
        BATCHNORM_KERNEL="torch",
    )
    assert printed == [True, "torch's operators, as BATCHNORM_KERNEL=torch asks", "ReluBackward0"]


@pytest.mark.parametrize("value", ["yes", "", "Torch"])
def test_an_unknown_value_of_the_switch(monkeypatch, value):
    monkeypatch.setenv(native.SWITCH, value)
    kernel, reason = native.load()
    assert kernel is None
    assert reason == f"torch's operators: BATCHNORM_KERNEL is {value!r}, expected 'native' or 'torch'"


@pytest.mark.parametrize("value", ["auto", "native"])
@needs_kernel
def test_the_switch_may_also_ask_for_the_kernel(monkeypatch, value):
    monkeypatch.setenv(native.SWITCH, value)
    assert native.load()[0] is not None


def test_a_missing_library(tmp_path):
    kernel, reason = native.load(tmp_path / "_bn.so")
    assert kernel is None
    assert "was not compiled when batchnorm was installed" in reason


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "_bn.so").write_text("not a library")
    kernel, reason = native.load(tmp_path / "_bn.so")
    assert kernel is None
    assert "cannot be loaded" in reason


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("long long bn_abi(void) { return 99; }", "_bn.so belongs to another version of batchnorm; reinstall it"),
        ("int other;", "cannot be loaded"),
    ],
    ids=["another version", "another library"],
)
def test_a_library_of_another_kind(tmp_path, code, sentence):
    (tmp_path / "tiny.c").write_text(code)
    library = compile_c(tmp_path / "tiny.c", tmp_path / "_bn.so", "-shared", "-fPIC")
    kernel, reason = native.load(library)
    assert kernel is None
    assert reason.startswith("torch's operators: ")
    assert sentence in reason


# ---- instruction sets --------------------------------------------------------------------------------------


@needs_kernel
def test_the_instruction_set_can_be_chosen(monkeypatch, copy):
    monkeypatch.setenv(native.SWITCH_ISA, "baseline")
    kernel, reason = native.load(copy)
    assert kernel.isa == "baseline"
    assert reason == "native kernel (baseline), on torch's own threads"
    assert kernels.kernel().library is not kernel.library


@needs_kernel
def test_an_unknown_instruction_set_is_ignored_and_told(monkeypatch, copy):
    monkeypatch.setenv(native.SWITCH_ISA, "mmx")
    kernel, reason = native.load(copy)
    assert kernel.isa == native.load(copy)[0].isa
    assert reason.startswith(f"native kernel ({kernel.isa}), on torch's own threads; BATCHNORM_ISA=mmx is not one of")
    assert not kernel.select("mmx")


@needs_kernel
def test_the_best_instruction_set_is_the_default(copy):
    kernel, _ = native.load(copy)
    supported = [isa for isa in kernel.isas() if kernel.select(isa)]
    assert supported[0] == "baseline"
    fresh, _ = native.load(shutil.copy(copy, copy.with_name("fresh.so")))
    assert fresh.isa == supported[-1]


# ---- the interface -----------------------------------------------------------------------------------------


def fields():
    """The fields of bn_args in order, read off the header."""
    header = re.sub(r"/\*.*?\*/", "", (SOURCE / "bn.h").read_text(), flags=re.S)
    body = re.search(r"typedef struct \{(.*?)\} bn_args;", header, re.S)[1]
    names = [name.strip() for declaration in body.split(";") for name in declaration.split(",")]
    return [re.sub(r"^.*[\s*]", "", name) for name in names if name]


def test_the_struct_has_the_fields_that_python_packs():
    names = fields()
    assert names[:8] == ["operation", "dtype", "activation", "aux", "threads", "batch", "channels", "positions"]
    assert names[-5:] == ["eps", "momentum", "slope", "cap", "total"]
    layout = native.pack_arguments.__self__
    assert len(names) == len(layout.unpack(bytes(layout.size)))


def test_the_struct_and_the_constants_are_the_compilers_too(tmp_path):
    names = fields()
    constants = ["BN_ABI", "BN_SAVED_ROWS", "BN_TRAIN", "BN_EVAL", "BN_MOMENTS", "BN_APPLY"]
    constants += ["BN_BACKWARD_TRAIN", "BN_BACKWARD_EVAL", "BN_GRAD_SUMS", "BN_GRAD_APPLY"]
    constants += ["BN_AUX_NONE", "BN_AUX_BITS", "BN_AUX_RESIDUAL", "BN_NONE", "BN_RELU", "BN_CLIPPED", "BN_SILU"]
    lines = [f'printf("%d\\n", (int)offsetof(bn_args, {name}));' for name in names]
    lines += ['printf("%d\\n", (int)sizeof(bn_args));', *(f'printf("%d\\n", (int){name});' for name in constants)]
    code = '#include "bn.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "\n}\n"
    (tmp_path / "layout.c").write_text(code)
    program = compile_c(tmp_path / "layout.c", tmp_path / "layout")
    printed = [
        int(line) for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    ]
    layout = native.pack_arguments.__self__
    # Every field is eight bytes, so a field's place is its number times eight, and the formats tell which are doubles.
    assert layout.format == f"{len(names) - 5}q5d"
    assert printed[: len(names)] == [8 * i for i in range(len(names))]
    assert printed[len(names)] == layout.size
    codes = {name: native.ACTIVATIONS[name][0] for name in ("none", "relu", "relu6", "silu")}
    assert printed[len(names) + 1 :] == [
        native.ABI,
        native.SAVED_ROWS,
        native.TRAIN,
        native.EVAL,
        native.MOMENTS,
        native.APPLY,
        native.BACKWARD_TRAIN,
        native.BACKWARD_EVAL,
        native.GRAD_SUMS,
        native.GRAD_APPLY,
        native.AUX_NONE,
        native.AUX_BITS,
        native.AUX_RESIDUAL,
        *codes.values(),
    ]


@needs_kernel
@pytest.mark.parametrize("shape", [(0, 32, 5), (2, 0, 5), (2, 32, 0), (64, 1, 1), (64, 3, 1), (9, 1, 3)])
def test_a_shape_it_does_not_serve_is_refused(shape):
    """Nothing is read: all addresses are 0."""
    assert kernels.kernel().run(native.pack_arguments(0, 0, 0, 0, 1, *shape, *[0] * 19, 1e-5, 0.1, 0.0, 0.0, 0.0)) == -2


# ---- threads -----------------------------------------------------------------------------------------------

WATCH_THREADS = """
import json, os, re, torch
import torch.nn.functional as F

def libraries():
    maps = open("/proc/self/maps").read()
    return sorted(set(re.findall(r"/\\S*/lib(?:gomp|iomp|omp)[^/\\s]*", maps)))

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
x = torch.randn(16, 64, 56, 56, requires_grad=True)
F.batch_norm(x, None, None, training=True).sum().backward()
before = threads(), libraries()
from batchnorm import kernels
from batchnorm.functional import batch_norm
for activation in ("none", "relu", "silu"):
    batch_norm(x, None, None, training=True, activation=activation).sum().backward()
print(json.dumps([kernels.kernel() is not None, before, [threads(), libraries()]]))
"""


@needs_kernel
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in Linux's /proc")
def test_the_kernel_works_on_torchs_own_threads():
    native_there, (threads_before, libraries_before), (threads_after, libraries_after) = in_a_new_process(WATCH_THREADS)
    assert native_there
    assert threads_after <= threads_before
    assert len(libraries_after) == 1
    assert libraries_after == libraries_before


@needs_kernel
@pytest.mark.parametrize("name", ["runs, three channels", "matrix, 256 rows", "matrix, tiles of channels"])
def test_without_a_pool_it_works_alone(copy, name):
    kernel, _ = native.load(copy)
    kernel.library.bn_use_openmp(None, None)
    with path(kernel.isa, kernel), threads(3):
        found = [sentence for case in large(name) for sentence in wrong(case, kernel.isa)]
    assert not found, "\n".join(found)


def give_only(kernel, number):
    """A pool of one thread, with this number, whatever is asked for. Hold what it returns: the library does not."""
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel = ctypes.CFUNCTYPE(None, body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
        lambda run, data, count, flags: run(data)
    )
    whoami = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: number)
    kernel.library.bn_use_openmp(*(ctypes.cast(entry, ctypes.c_void_p) for entry in (parallel, whoami)))
    return parallel, whoami


@needs_kernel
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("name", ["runs, three channels", "matrix, 256 rows", "matrix, tiles of channels"])
def test_threads_that_never_come_hold_up_nobody(copy, name, number):
    kernel, _ = native.load(copy)
    held = give_only(kernel, number)
    with path(kernel.isa, kernel), threads(3):
        found = [sentence for case in large(name) for sentence in wrong(case, kernel.isa)]
    assert not found, "\n".join(found)
    assert kernel.core_distance() is None
    del held


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not tell which cores are ours")
def test_the_distance_between_cores():
    measure = """
import json, os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
from batchnorm import kernels
tries = (kernels.kernel().core_distance() for _ in range(TRIES))
print(json.dumps(next((distance for distance in tries if distance is not None), None)))
"""
    assert in_a_new_process(measure.replace("CORES", "1").replace("TRIES", "1")) is None
    if len(os.sched_getaffinity(0)) > 1:  # a core that is busy with something else has no time for it
        assert 1 < in_a_new_process(measure.replace("CORES", "2").replace("TRIES", "100")) < 100_000


@needs_kernel
def test_calls_from_many_threads_at_once():
    """Nothing is shared between calls: the same call from four Python threads has one result."""
    from concurrent.futures import ThreadPoolExecutor

    from batchnorm.functional import batch_norm

    x = torch.randn(9, 40, 13, 11, generator=torch.Generator().manual_seed(0))
    with threads(2):
        expected = batch_norm(x, None, None, training=True, activation="silu")
        with ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda _: batch_norm(x, None, None, training=True, activation="silu"), range(40))
            assert all(torch.equal(y, expected) for y in results)


@needs_kernel
def test_no_sweep_loads_behind_a_mask():
    """A masked load is requested when its mask is known: dy would wait for the comparison of what x gives."""
    objdump = shutil.which("objdump")
    if objdump is None or "avx512" not in kernels.kernel().isas():
        pytest.skip("no objdump, or no AVX-512 in this build")
    found = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(native.LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    sweeps = re.findall(r"<((?:forward|backward)_r\w+_avx512)>:\n(.*?)\n\n", found, re.DOTALL)
    assert sorted(name.removesuffix("_avx512") for name, _ in sweeps) == [
        "backward_rows", "backward_runs", "forward_rows", "forward_runs",
    ]  # fmt: skip
    for name, code in sweeps:
        assert "%zmm" in code
        masked = re.findall(r".*\(%(?!rsp|rbp|rip)[^)]*\),.*\{%k\d\}.*", code)
        assert not masked, (name, len(masked), masked[0])
