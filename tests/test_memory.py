import ctypes
import json
import platform
import subprocess
import sys
import types

import pytest

from batchnorm.memory import keep_freed_memory

# Blocks of 51 MB, freed and allocated anew in every step; counts the page faults of five steps without the
# setting and, after five steps to grow the heap, of five steps with it.
PROGRAM = """
import ctypes, json, resource
from batchnorm.memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
library.free.argtypes, library.free.restype = [ctypes.c_void_p], None

def faults_of_steps(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        blocks = [library.malloc(51 * 2**20) for _ in range(2)]
        for block in blocks:
            ctypes.memset(block, 1, 51 * 2**20)
        for block in blocks:
            library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults_of_steps(5)
worked = keep_freed_memory()
faults_of_steps(5)
print(json.dumps({"worked": worked, "usual": usual, "kept": faults_of_steps(5)}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["worked"] is True
    # Ten blocks mapped anew, in pages of up to 2 MB each; then none.
    assert result["usual"] > 10 * 51 / 2
    assert result["kept"] < result["usual"] / 10


def test_other_c_libraries_are_left_alone(monkeypatch):
    def unexpected(*args):
        raise AssertionError("mallopt was called")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=unexpected))
    assert keep_freed_memory() is False


def test_a_system_without_a_shared_c_library_is_left_alone(monkeypatch):
    def missing(name):
        raise TypeError("bad argument type for built-in operation")  # what Windows says to CDLL(None)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert keep_freed_memory() is False


@pytest.mark.parametrize("answers", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_it_says_whether_both_settings_were_accepted(monkeypatch, answers):
    calls = []

    class FakeMallopt:  # an object, because a function's argtypes and restype are set
        def __call__(self, parameter, value):
            calls.append((parameter, value))
            return answers[len(calls) - 1]

    library = types.SimpleNamespace(mallopt=FakeMallopt(), gnu_get_libc_version=None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() is (answers == (1, 1))
    assert calls == [(-4, 0), (-1, -1)]
