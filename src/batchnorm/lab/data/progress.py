"""A bar for work that turns out to be slow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, TypeVar

from batchnorm.errors import printable
from batchnorm.progress import bars

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0  # seconds without a bar
T = TypeVar("T")


def slow(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; from two seconds on, show on stderr how many are done.

    >>> list(slow([1, 2], "counting"))
    [1, 2]
    """
    total = len(items) if isinstance(items, Sized) else total
    begun, bar = time.monotonic(), None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - begun > PATIENCE:
                bar = started(what, total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def started(what: str, total: int | None) -> Progress:
    """Return a bar that is drawn on stderr, where that is a terminal, and removed when it is stopped."""
    bar = bars()
    bar.add_task(printable(what), total=total)
    bar.start()
    return bar
