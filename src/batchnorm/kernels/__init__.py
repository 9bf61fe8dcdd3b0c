"""The fast path: ``bn.c`` behind ``native.py``. ``fallback.py`` has the same operations in torch's operators."""

from __future__ import annotations

from batchnorm.kernels import call
from batchnorm.kernels.native import Kernel, load

_kernel, _reason = load()


def kernel() -> Kernel | None:
    """Return the native kernel in use, or None.

    >>> in_use = kernel()
    >>> in_use is None or in_use.isa in in_use.isas()
    True
    """
    return _kernel


def describe() -> str:
    """Say in one sentence which path is in use, and why.

    >>> print(describe())  # doctest: +SKIP
    native kernel (avx2), on torch's own threads
    """
    return f"{_reason}{'; ' + call.reason if _kernel is not None and call.reason else ''}"
