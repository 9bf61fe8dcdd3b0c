"""How a command prints and ends: names are escaped, and every failure is one sentence and an exit code."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, get_type_hints

from batchnorm import interrupts, progress
from batchnorm.errors import BatchNormError, printable
from batchnorm.options import Quiet, Verbose

FAILED = 2  # as for wrong options


def say(text: str, *, error: bool = False) -> None:
    """Print one line to stdout, or to stderr, with names in it escaped.

    >>> say("written to a\\x1b[31m.pt")
    written to a\\x1b[31m.pt
    """
    stream = sys.stderr if error else sys.stdout
    stream.write(f"{printable(text)}\n")
    stream.flush()


def note(text: str, *, error: bool = False) -> None:
    """Print a line beside the results, unless ``--quiet`` was given.

    >>> note("written to a.pt")
    written to a.pt
    """
    if progress.level() != progress.QUIET:
        say(text, error=error)


def with_levels(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --quiet and --verbose.

    >>> def greet(name: str) -> None:
    ...     note(f"hello, {name}")
    >>> with_levels(greet)(name="you", quiet=True)
    >>> progress.set_level(progress.NORMAL)
    """

    @functools.wraps(command)
    def run(*arguments: Any, quiet: bool = False, verbose: bool = False, **more: Any) -> Any:
        if quiet and verbose:
            raise BatchNormError("--quiet and --verbose are given together", do="give one of them")
        if quiet or verbose:
            progress.set_level(progress.QUIET if quiet else progress.VERBOSE)
        return command(*arguments, **more)

    hints = get_type_hints(command, include_extras=True)
    own = [each.replace(annotation=hints[name]) for name, each in inspect.signature(command).parameters.items()]
    for name, kind in (("quiet", Quiet), ("verbose", Verbose)):
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))
    run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in own}
    return run


def ended(command: Callable[[], Any]) -> int:
    """Run a command to its end and return its exit code; every failure is one sentence on stderr.

    >>> ended(lambda: 0)
    0
    """
    with warnings.catch_warnings():
        try:
            _lenient_streams()
            progress.set_level(progress.NORMAL)
            warnings.showwarning = _show_warning
            return _outcome(command)
        except KeyboardInterrupt:
            interrupts.settle()
            _last_words("interrupted")
            return 128 + (interrupts.pending() or signal.SIGINT)


def _outcome(command: Callable[[], Any]) -> int:
    try:
        try:
            code = int(command() or 0)
        except SystemExit as error:
            code = _code_of(error)
        sys.stdout.flush()
    except Exception as error:
        interrupts.check()  # a library may have turned the interrupt into another error
        code = _failed(error)
    interrupts.check()
    return code


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    say(f"batchnorm: {error.code}", error=True)
    return 1


def _failed(error: Exception) -> int:
    """Print the sentence of an error that a user can act on; raise any other, which is a bug of ours."""
    if progress.level() == progress.VERBOSE:
        for line in "".join(traceback.format_exception(error)).splitlines():
            say(line, error=True)
    if isinstance(error, BatchNormError):
        return _last_words(str(error))
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a wrong option, by typer or click
        context = getattr(error, "ctx", None)
        where = f"; see {context.command_path} --help" if context is not None else ""
        _last_words(f"{str(error.format_message()).rstrip('.')}{where}")
        return int(error.exit_code)
    if isinstance(error, OSError):
        return _last_words("" if error.errno == errno.EPIPE else described(error))
    if isinstance(error, (MemoryError, RecursionError)):
        return _last_words(f"{type(error).__name__}: the input is too large or too deeply nested")
    raise error


def described(error: OSError) -> str:
    """Say in one sentence what the system refused.

    >>> described(FileNotFoundError(2, "No such file or directory", "a.pt"))
    'a.pt: no such file or directory'
    """
    why = error.strerror or str(error) or type(error).__name__
    place = error.filename if error.filename is not None else "output" if error.errno == errno.ENOSPC else ""
    return f"{os.fsdecode(place)}: {why[0].lower()}{why[1:]}" if place else why


def _last_words(text: str) -> int:
    """Write a sentence to stderr, and make sure that nothing fails at the very end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr and text:
                say(f"batchnorm: {text}", error=True)
            stream.flush()
        except (OSError, ValueError):  # full, or a closed pipe: do not fail again when the interpreter flushes it
            _discard(stream)
    return FAILED


def _discard(stream: Any) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _lenient_streams() -> None:
    """Let no character make printing fail: what the encoding of a stream lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line="")
    say(text.rstrip(), error=True)
