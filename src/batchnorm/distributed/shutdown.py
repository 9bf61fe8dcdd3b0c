"""Let a process report which rank is missing before SIGTERM ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_sigterm() -> Iterator[Callable[[str], None]]:
    """Delay SIGTERM to the end of the block. If it arrived, print the given messages, then let it take effect.

    >>> with delayed_sigterm() as say:
    ...     say("rank 1 is gone")

    torchrun sends SIGTERM to all other processes a tenth of a second after one dies, which is too soon to find out
    which one it was, and SIGKILL half a minute later. Nothing is changed in a process that handles the signal itself,
    or outside of the main thread, which alone may set handlers.
    """
    words: list[str] = []
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield words.append
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        yield words.append
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            print("\n".join(words), file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
