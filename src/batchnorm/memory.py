"""An opt-in for training on CPUs: let the C library keep the memory that a step frees, for the next step."""

from __future__ import annotations

import ctypes

# The parameter numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees, for its next step; True where that took effect.

    >>> import batchnorm as bn
    >>> bn.keep_freed_memory()  # doctest: +SKIP
    True

    Call it once, early in a training script. By default glibc gives every block of more than 32 MB its own
    mapping and unmaps it when it is freed, and gives back the top of its heap when enough of it is free. A
    training step frees its activations and allocates the same sizes again a moment later, so the system has
    to hand out, and zero, every page of them on every step: at 51 MB an activation that is most of the time
    of a normalisation layer. After this call blocks of every size come from the heap, and the heap never
    shrinks.

    What it costs: the process stays at the peak of its memory until it ends, and that peak is higher (1.2 to
    2 times in our runs, since large blocks now share one heap and leave gaps). Do not call it in a process
    that shares its machine and alternates between large and small work.

    It is a setting of the process, not of this package: torch's own operators and every other library that
    allocates through ``malloc`` get faster with it too. It cannot be taken back; glibc stops adapting its
    thresholds once they have been set by hand.

    Elsewhere than on glibc (musl, macOS, Windows) there is nothing to set: it returns False, changes nothing
    and does not warn, so that one training script serves all systems. Under a replaced allocator (jemalloc,
    tcmalloc) glibc accepts the setting but no longer serves the allocations, and nothing changes.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # other C libraries know mallopt with other meanings
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Raising M_MMAP_THRESHOLD instead would not do: glibc before 2.35 refuses more than 32 MB.
    no_mappings = mallopt(_M_MMAP_MAX, 0)
    no_trimming = mallopt(_M_TRIM_THRESHOLD, -1)
    return bool(no_mappings and no_trimming)
