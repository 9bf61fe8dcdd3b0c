"""call.c as a build: what it is given, what it is not used with, how it is made, and the sanitizers."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from call_cases import NONE, WHY, ran_in_c, tensor
from kernel_compiler import SOURCE, compile_c, compiler

import batchnorm as bn
from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.functional import batch_norm
from batchnorm.kernels import call

pytestmark = pytest.mark.skipif(NONE, reason=WHY)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    assert not ran_in_c(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


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
    assert ran_in_c(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


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
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for version, functions in {"2.5": Functions(2, 5), "1.4": Functions(1, 4)}.items():  # the second has no functions
        capsule = new_capsule(ctypes.addressof(functions), b"dlpack_exchange_api", None)
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
        offered = f"offers DLPack {version}, which is not all of version 1"
        assert call.load() == (None, f"called from Python: torch {torch.__version__} {offered}")
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert call.load() == (None, f"called from Python: torch {torch.__version__} does not offer DLPack's functions")
    assert ran_in_c(batch_norm(tensor("rows").requires_grad_(), None, None, training=True))


TELL = """
import json, torch
from batchnorm import kernels
from batchnorm.functional import batch_norm
y = batch_norm(torch.randn(32, 64, requires_grad=True), None, None, training=True)
print(json.dumps([kernels.describe(), type(y.grad_fn).__name__]))
"""


@pytest.mark.parametrize(("switch", "message", "name"), [
    ("python", "; called from Python, as BATCHNORM_CALL=python asks", "NativeBackward"),
    ("pyton", "; called from Python: BATCHNORM_CALL is 'pyton', expected 'c' or 'python'", "NativeBackward"),
    ("c", "threads", "PlainBackward"),
    ("", "threads", "PlainBackward"),
])  # fmt: skip
def test_the_switch(switch, message, name):
    done = subprocess.run(
        [sys.executable, "-c", TELL], env={**os.environ, "BATCHNORM_CALL": switch}, capture_output=True, text=True
    )
    described, function = json.loads(done.stdout)
    assert described.endswith(message)
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
    assert "batchnorm: the C call path to the kernel could not be built (are Python's headers there?)" in done.stdout
    assert [path.name for path in (tmp_path / "lib").rglob("*.so")] == ["_bn.so"]


@pytest.mark.slow
def test_the_sanitizers_find_nothing(tmp_path):
    """All of this again, with call.c and the kernel under AddressSanitizer and UBSan, in a copy of the package."""
    package = shutil.copytree(SOURCE.parent, tmp_path / "batchnorm", ignore=shutil.ignore_patterns("__pycache__"))
    for source, library in (("call.c", "_call.abi3.so"), ("bn.c", "_bn.so")):
        compile_c(
            SOURCE / source,
            package / "kernels" / library,
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
         *sorted(Path(__file__).parent.glob("test_call*.py"))],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
