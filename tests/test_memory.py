import ctypes
import json
import platform
import subprocess
import sys
import types

import pytest

from batchnorm.memory import keep_freed_memory

# Blocks of 51 MB, as torch frees and allocates them in every step; the page faults of the last steps are counted.
PROGRAM = """
import json, resource, sys
import torch
from batchnorm.memory import keep_freed_memory

worked = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    a = torch.empty(51 * 2**18)
    a.fill_(1)
    b = a + 1
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
before = faults()
for _ in range(5):
    step()
print(json.dumps({"worked": worked, "faults": faults() - before}))
"""


def run(mode):
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_kept():
    usual, kept = run("usual"), run("keep")
    assert kept["worked"] is True
    # Without the setting each of the 10 blocks is mapped anew. With it a block or two may still find no gap.
    assert usual["faults"] > 5 * 51 * 2**20 // 65536
    assert kept["faults"] < usual["faults"] / 3


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
