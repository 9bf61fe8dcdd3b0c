"""What a process was about to say is said, even if it is told to end while it finds out."""

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
    """Put SIGTERM off to the end of the block; if it came, write what there was to say before it takes effect.

    >>> with delayed_sigterm() as say:
    ...     say("rank 1 is gone")

    torchrun sends SIGTERM to all others a tenth of a second after one process dies, which is sooner than anybody can be
    asked who it was, and it waits half a minute before it uses force. A process that handles the signal itself is left
    alone, and so is every thread but the main one, which may not touch signals.
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
