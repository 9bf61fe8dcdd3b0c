"""The kernel under AddressSanitizer and UndefinedBehaviorSanitizer, and its 16-lane code where there is no AVX-512.

`sanitize.c` says how to run it under valgrind, too.
"""

import subprocess

import pytest
import statistics_cases
from kernel_cases import LARGE, POSITIONS, large, odd_shapes, path, threads, wrong
from kernel_compiler import HERE, SOURCE, compile_c
from statistics_cases import SHAPES, Case

from batchnorm.kernels import native

pytestmark = pytest.mark.slow

SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DBN_EMULATE_AVX512")
RELEASE = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return compile_c(HERE / "sanitize.c", tmp_path_factory.mktemp("sanitize") / "sanitize", *SANITIZERS)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_no_byte_too_far_and_no_number_wrong(driver, isa):
    done = subprocess.run([driver, isa], capture_output=True, text=True)
    assert done.returncode == 0 or "lacks it" in done.stdout, done.stdout + done.stderr
    assert "runtime error" not in done.stderr
    if "lacks it" in done.stdout:
        pytest.skip(done.stdout.splitlines()[0])
    assert done.stdout.endswith("\n0 wrong\n")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A kernel whose "avx512" is the 16-lane code in AVX2's instructions."""
    library = tmp_path_factory.mktemp("emulated") / "_bn.so"
    kernel, reason = native.load(compile_c(SOURCE / "bn.c", library, *RELEASE, "-DBN_EMULATE_AVX512"))
    assert kernel is not None, reason
    if not kernel.select("avx512"):
        pytest.skip("this CPU has no AVX2 to emulate AVX-512 with")
    return kernel


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_sixteen_lanes_over_odd_shapes(emulated, positions, layout):
    with path("avx512", emulated):
        found = [sentence for case in odd_shapes(positions, layout) for sentence in wrong(case, "avx512")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", LARGE)
def test_sixteen_lanes_over_large_shapes(emulated, name, count):
    with path("avx512", emulated), threads(count):
        found = [sentence for case in large(name, count) for sentence in wrong(case, "avx512")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("mask", [None, "random", "lengths", "islands", "samples"])
def test_sixteen_lanes_over_masks_and_groups(emulated, mask, groups):
    """Rows shorter than these vectors are where a mask takes another way than with eight lanes."""
    cases = [
        Case(shape, mask, groups, layout, activation=activation, residual=True, reduce=groups == 1, given=groups == 3)
        for shape in [*SHAPES[:6], (8, 4, 16), (6, 3, 31)]
        for layout in ("contiguous", "channel_last")
        for activation in ("none", "relu", "silu")
        if shape[0] >= 2 * groups
    ]
    with path("avx512", emulated), threads(1):
        found = [sentence for case in cases for sentence in statistics_cases.wrong(case, "avx512")]
    assert not found, "\n".join(found)
