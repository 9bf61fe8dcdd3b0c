"""What the compiler made of the sweeps, read from the disassembly."""

import re
import shutil
import subprocess

import pytest

from batchnorm import kernels
from batchnorm.kernels import native

# A masked load from memory of unknown alignment, which no value that was spilled to the stack has.
MASKED_LOAD = re.compile(r"\tvmov(?:dqu\d*|ups)\s+[^%\s]*\(%[^)]*\),%[xyz]mm\d+\{%k")
OBJDUMP = shutil.which("objdump")


@pytest.mark.skipif(OBJDUMP is None, reason="objdump is not installed")
def test_no_load_in_a_sweep_waits_for_a_mask():
    if kernels.kernel() is None:
        pytest.skip(f"no compiled kernel: {kernels.describe()}")
    command = [OBJDUMP, "--disassemble", "--no-show-raw-insn", native.LIBRARY]
    sweeps, waits, inside = set(), [], ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if found := re.match(r"[0-9a-f]+ <(\w+)>:", line):
            inside = found[1]
        elif inside.startswith("same_"):
            sweeps.add(inside)
            if MASKED_LOAD.search(line):
                waits.append(f"{inside}: {line}")
    if not sweeps:
        pytest.skip("the library was stripped, or not built for x86")
    assert waits == []
