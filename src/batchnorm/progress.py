"""How much is shown beside results: ``--quiet`` and ``--verbose``, and the bars of long work."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

QUIET, NORMAL, VERBOSE = -1, 0, 1
_level = NORMAL


def set_level(level: int) -> None:
    """Choose what commands show beside results: nothing (QUIET), notes and bars, or tracebacks, too (VERBOSE).

    >>> set_level(NORMAL)
    """
    global _level
    _level = level


def level() -> int:
    """Return what commands show beside results.

    >>> level() == NORMAL
    True
    """
    return _level


def shows_bars(console: Console, wanted: bool | None = None) -> bool:
    """Whether a moving picture is drawn there: on a terminal, or in a notebook that has ipywidgets; else if wanted.

    >>> import io
    >>> from rich.console import Console
    >>> shows_bars(Console(file=io.StringIO()))
    False
    """
    if _level == QUIET or wanted is False:
        return False
    if console.is_jupyter:  # without ipywidgets rich warns instead of drawing
        return find_spec("ipywidgets") is not None
    return console.is_terminal if wanted is None else wanted


def bars(
    *columns: ProgressColumn, console: Console | None = None, wanted: bool | None = None, refresh: bool = True
) -> Progress:
    """Return the bar of long work: what is done, and the time that is left; on stderr unless a console is given.

    >>> with bars() as shown:
    ...     task = shown.add_task("calibrating", total=10)
    ...     shown.advance(task)

    It is drawn as `shows_bars` says, and removed at its end. Given columns come before how much is done. Without
    ``refresh`` it is drawn only when it is updated: no thread takes time from what is measured.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = console or Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=refresh,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not shows_bars(console, wanted),
    )
