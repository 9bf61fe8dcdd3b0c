"""Ctrl-C while a command runs: remembered, so that code which swallows the exception cannot swallow the interrupt.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. In a destructor, in a callback from C or in
an ``except:`` of another package it is lost, and the command would go on, write its file and exit with 0.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_came: list[int] = []
_held: list[bool] = []


@contextmanager
def remembered() -> Iterator[None]:
    """Record SIGINT, SIGTERM and SIGHUP in the block, besides raising ``KeyboardInterrupt``.

    >>> with remembered():
    ...     pending()
    0
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _came.clear()
    _held.clear()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP, a shell's background job SIGINT
                signal.signal(number, _note)
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    if not _held:
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Let an interrupt of the command wait for the end of the block: of a few lines that belong together.

    >>> with held():
    ...     pass
    """
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()
    check()


def pending() -> int:
    """Return the signal that interrupted the command, or 0.

    >>> pending()
    0
    """
    return _came[0] if _came else 0


def check() -> None:
    """Raise ``KeyboardInterrupt`` again if one was swallowed: called before a file takes its place.

    >>> check()
    """
    if _came:
        raise KeyboardInterrupt


def accept() -> None:
    """Note that an interrupt was handled: the command ends early and keeps what is done.

    >>> accept()
    """
    _came.clear()


@contextmanager
def putting_back(restore: Callable[[], None]) -> Iterator[None]:
    """Run ``restore`` after the block, and run it again if an interrupt cut it short.

    >>> with putting_back(lambda: print("restored")):
    ...     print("changed")
    changed
    restored
    """
    try:
        try:
            yield
        finally:
            restore()
    except KeyboardInterrupt:
        restore()
        raise
