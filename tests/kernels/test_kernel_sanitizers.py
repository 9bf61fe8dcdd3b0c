"""The kernel under AddressSanitizer and UndefinedBehaviorSanitizer, its 16-lane code where there is no AVX-512, and its
stores past the caches on small shapes.

`sanitize.c` says how to run it under valgrind, too.
"""

import subprocess

import kernel_cases
import pytest
import statistics_cases
import torch
from kernel_cases import LARGE, NATIVE, POSITIONS, large, odd_shapes, path, threads, wrong
from kernel_compiler import HERE, SOURCE, compile_c
from statistics_cases import SHAPES, Case

from batchnorm.kernels import native

pytestmark = pytest.mark.slow

# Where the CPU has AVX-512, its own instructions are tried.
EMULATED = () if "avx512" in NATIVE else ("-DBN_EMULATE_AVX512",)
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *EMULATED)
RELEASE = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")


@pytest.fixture(scope="module", params=["as it is", "as if all were large"])
def driver(request, tmp_path_factory):
    flags = SANITIZERS if request.param == "as it is" else (*SANITIZERS, "-DBN_STREAM_FROM=1")
    return compile_c(HERE / "sanitize.c", tmp_path_factory.mktemp("sanitize") / "sanitize", *flags)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
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


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    """A kernel all of whose output goes past the caches where its rows are whole cache lines."""
    library = tmp_path_factory.mktemp("streaming") / "_bn.so"
    kernel, reason = native.load(compile_c(SOURCE / "bn.c", library, *RELEASE, "-DBN_STREAM_FROM=1"))
    assert kernel is not None, reason
    return kernel


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("shape", [(9, 32, 16), (4, 33, 96), (2, 2, 65536), (300, 64), (60, 320), (40, 96, 5)])
def test_small_outputs_past_the_caches(streaming, isa, shape, activation):
    cases = [
        kernel_cases.Case(shape, layout, dtype, activation=activation, residual=residual, training=training)
        for layout in ("contiguous", "channel_last")
        for dtype in (torch.float32, torch.bfloat16)
        for residual in (False, True)
        for training in (False, True)
    ]
    for count in (1, 3):
        with path(isa, streaming), threads(count):
            found = [sentence for case in cases for sentence in wrong(case, isa)]
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
