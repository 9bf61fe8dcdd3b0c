"""Ctrl-C while a command runs: remembered, so that code which swallows the exception cannot swallow the interrupt.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. In a destructor, in a callback from C or in
an ``except:`` of another package it is lost, and the command would go on, write its file and exit with 0.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_came: list[int] = []
_held: list[bool] = []
_replayed: list[bool] = []
NATIVE = ("torch", "numpy", "onnx", "onnxruntime")


def remember() -> None:
    """Record SIGINT, SIGTERM and SIGHUP from now on, besides raising ``KeyboardInterrupt``.

    >>> remember()  # doctest: +SKIP
    """
    if threading.current_thread() is not threading.main_thread():
        return  # which may not set handlers
    for state in (_came, _held, _replayed):
        state.clear()
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP, a background job SIGINT
            signal.signal(number, _note)
    sys.unraisablehook = _unraisable


def _unraisable(lost: Any) -> None:
    """Print what a destructor or a callback could not raise; of an interrupt, that it came is recorded."""
    if not (_came and isinstance(lost.exc_value, KeyboardInterrupt)):
        sys.__unraisablehook__(lost)


def _note(number: int, frame: FrameType | None) -> None:
    if _replayed:
        _replayed.clear()
    else:
        _came.append(number)
    if _held:
        return
    if len(_came) == 1 and _in_native_import(frame):
        # Their C++ calls Python while it sets itself up, and an exception there ends the process: ask again soon.
        timer = threading.Timer(0.05, _replay, (number,))
        timer.daemon = True
        timer.start()
        return
    raise KeyboardInterrupt


def _replay(number: int) -> None:
    _replayed.append(True)
    _thread.interrupt_main(signal.Signals(number))


def _in_native_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and str(frame.f_globals.get("__name__")).partition(".")[0] in NATIVE:
            return True
        frame = frame.f_back
    return False


def settle() -> None:
    """Let no further signal change how a command ends that has ended.

    >>> settle()  # doctest: +SKIP
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _note:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the interpreter takes away a handler in Python as it ends


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
