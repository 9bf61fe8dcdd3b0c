"""Load the compiled kernel, if there is one. A call takes one struct of numbers and addresses."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI = 5
SAVED_ROWS = 5
TRAIN, EVAL, MOMENTS, APPLY, BACKWARD_TRAIN, BACKWARD_EVAL, GRAD_SUMS, GRAD_APPLY = range(8)
AUX_NONE, AUX_BITS, AUX_RESIDUAL = range(3)
# Name -> the kernel's code, and where a clipped activation ends (NaN: nowhere); its slope below 0 is an argument.
ACTIVATIONS = {"none": (0, 0.0), "relu": (1, 0.0), "relu6": (2, 6.0), "leaky_relu": (2, float("nan")), "silu": (3, 0.0)}

# The fields of bn_args in bn.h, in order: 27 integers and addresses, then eps, momentum, slope, cap, total.
pack_arguments = struct.Struct("27q5d").pack

LIBRARY = Path(__file__).with_name("_bn.so")
SWITCH = "BATCHNORM_KERNEL"
SWITCH_ISA = "BATCHNORM_ISA"


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    >>> kernel, reason = load()
    >>> kernel is None or kernel.run.__name__ == "bn_run"
    True
    """

    run: Any
    library: ctypes.CDLL
    threads: str

    def isas(self) -> list[str]:
        """The instruction sets this build has code for.

        >>> kernel, reason = load()
        >>> kernel is None or "baseline" in kernel.isas()
        True
        """
        return [self.library.bn_isa_name(i).decode() for i in range(self.library.bn_isa_count())]

    @property
    def isa(self) -> str:
        """The instruction set in use.

        >>> kernel, reason = load()
        >>> kernel is None or kernel.isa in kernel.isas()
        True
        """
        return str(self.library.bn_isa_name(self.library.bn_isa_current()).decode())

    def select(self, isa: str) -> bool:
        """Switch to another instruction set; False if this CPU or this build lacks it.

        >>> kernel, reason = load()
        >>> kernel is None or kernel.select(kernel.isa)
        True

        Do not switch between a forward pass and its backward pass: what is saved depends on the instruction set.
        """
        return isa in self.isas() and self.library.bn_isa_select(self.isas().index(isa)) == 0

    def core_distance(self) -> float | None:
        """The nanoseconds that a cache line takes from one of torch's threads to another; None if there is only one.

        >>> kernel, reason = load()
        >>> distance = kernel and kernel.core_distance()
        >>> distance is None or distance > 0
        True

        The system may move threads at any time, which changes the speed on small batches.
        """
        nanoseconds = float(self.library.bn_core_distance())
        return nanoseconds if nanoseconds > 0 else None


def load(path: Path = LIBRARY) -> tuple[Kernel | None, str]:
    """Return the kernel or None, and a sentence on what is used and why.

    >>> kernel, reason = load()
    >>> print(reason)  # doctest: +SKIP
    native kernel (avx2), on torch's own threads
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "native", "torch"):
        return None, f"torch's operators: {SWITCH} is {wanted!r}, expected 'native' or 'torch'"
    if wanted == "torch":
        return None, f"torch's operators, as {SWITCH}=torch asks"
    if not path.exists():
        return None, "torch's operators: the kernel was not compiled when batchnorm was installed (no C compiler?)"
    try:
        library = ctypes.CDLL(str(path))
        library.bn_abi.restype = ctypes.c_int64
        if library.bn_abi() != ABI:
            return None, f"torch's operators: {path.name} belongs to another version of batchnorm; reinstall it"
    except (OSError, AttributeError) as error:
        return None, f"torch's operators: the compiled kernel cannot be loaded ({error})"
    library.bn_run.argtypes = [ctypes.c_char_p]
    library.bn_run.restype = ctypes.c_int64
    library.bn_run.address = ctypes.cast(library.bn_run, ctypes.c_void_p).value  # type: ignore[attr-defined]  # for call.c
    library.bn_isa_name.restype = ctypes.c_char_p
    library.bn_core_distance.restype = ctypes.c_double
    for name in ("bn_isa_count", "bn_isa_current", "bn_isa_select"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("bn_isa_name", "bn_isa_select"):
        getattr(library, name).argtypes = [ctypes.c_int64]
    kernel = Kernel(library.bn_run, library, _share_threads(library))
    isa = os.environ.get(SWITCH_ISA)
    note = ""
    if isa and not kernel.select(isa):
        note = f"; {SWITCH_ISA}={isa} is not one of {kernel.isas()} or not of this CPU, ignored"
    return kernel, f"native kernel ({kernel.isa}), {kernel.threads}{note}"


def _share_threads(library: ctypes.CDLL) -> str:
    """Give the kernel the OpenMP that torch itself is linked to, so that there is one pool of threads, not two.

    Looking a symbol up in libtorch_cpu searches what that library depends on, so this finds torch's OpenMP even if
    the process has loaded another one.
    """
    library.bn_use_openmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    try:
        torchs = torchs_library()
        entries = (torchs.GOMP_parallel, torchs.omp_get_thread_num)
    except (OSError, AttributeError):
        return "on one thread: torch's OpenMP was not found"
    library.bn_use_openmp(*(ctypes.cast(entry, ctypes.c_void_p) for entry in entries))
    return "on torch's own threads"


def torchs_library() -> ctypes.CDLL:
    """Return torch's own library for CPUs, by which its functions are found; an OSError if there is none.

    >>> torchs_library() is not None
    True
    """
    import torch

    folder = Path(torch.__file__).parent / "lib"
    names = [folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"]
    return ctypes.CDLL(str(next((path for path in names if path.exists()), names[0])))
