"""A status line on the terminal, for verbs that take long because they run the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from batchnorm.progress import shows_bars

Given = ParamSpec("Given")
Result = TypeVar("Result")
PATIENCE = 2.0  # seconds before anything is shown
clock = time.monotonic


class _Stages:
    """The stages of one call of a verb, shown once it has taken a while."""

    def __init__(self, verb: str, wanted: bool | None, stack: ExitStack) -> None:
        self.verb, self.wanted, self.stack = verb, wanted, stack
        self.begun = clock()
        self.bars: Any = None

    def enter(self, words: str) -> None:
        if self.wanted is False or clock() - self.begun < PATIENCE:
            return
        if self.bars is None:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            console = Console(stderr=True)
            shown = shows_bars(console, self.wanted)
            bars = Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown)
            self.bars = self.stack.enter_context(bars)
            self.bars.add_task("")
        self.bars.update(self.bars.task_ids[0], description=f"{self.verb}: {words}", refresh=True)


_current: ContextVar[_Stages | None] = ContextVar("_current", default=None)


def stage(words: str) -> None:
    """Say what the verb that is running does next.

    >>> stage("comparing outputs")  # no verb is running
    """
    stages = _current.get()
    if stages is not None:
        stages.enter(words)


def in_stages(verb: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let a function with an argument ``progress`` show its stages, on a terminal (None) or always (True).

    >>> @in_stages
    ... def count(progress=None):
    ...     stage("counting")
    ...     return 3
    >>> count()
    3
    """

    @wraps(verb)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if _current.get() is not None:  # one verb inside another
            return verb(*args, **kwargs)
        with ExitStack() as stack:
            token = _current.set(_Stages(verb.__name__, cast("bool | None", kwargs.get("progress")), stack))
            stack.callback(_current.reset, token)
            return verb(*args, **kwargs)

    return run
