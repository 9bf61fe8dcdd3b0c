"""A C compiler for tests that want one, and where the kernel's source is."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from batchnorm.kernels import native

SOURCE = Path(native.__file__).parent
HERE = Path(__file__).parent


@functools.cache
def compiler():
    return next((found for name in (os.environ.get("CC"), "gcc", "cc") if name and (found := shutil.which(name))), None)


def compile_c(source, output, *options):
    """Compile one file, or skip the test if there is no compiler."""
    if compiler() is None:
        pytest.skip("no C compiler")
    command = [compiler(), "-std=gnu11", "-Wno-psabi", f"-I{SOURCE}", *options, str(source), "-o", str(output), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output
