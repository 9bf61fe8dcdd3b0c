"""What is seen while runs are under way: one moving table on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchnorm.errors import printable
from batchnorm.lab.runs.local import Watch
from batchnorm.lab.runs.store import Folder
from batchnorm.progress import QUIET, level, shows_bars

SHOWN = 12  # runs under way that are listed


@contextmanager
def watching(console: Console, folders: Sequence[Folder]) -> Iterator[Watch]:
    """Give the function that shows where runs stand on this console.

    >>> with watching(Console(), folders) as watch:  # doctest: +SKIP
    ...     run_locally(store, folders, watch=watch)
    """
    if level() == QUIET:
        yield lambda running, failed: None
        return
    if not shows_bars(console):
        yield plain_lines(console, folders)
        return
    began, before = time.monotonic(), done_share(folders)
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def watch(running: Sequence[Folder], failed: Mapping[str, str]) -> None:
            live.update(picture(folders, running, failed, time.monotonic() - began, before))

        yield watch


def share(folder: Folder) -> float:
    """Return which share of a run is done."""
    if folder.finished:
        return 1.0
    stands = folder.progress()
    return min(1.0, stands["done"] / stands["total"]) if stands.get("total") else 0.0


def done_share(folders: Sequence[Folder]) -> float:
    """Return which share of some runs is done, each counted alike."""
    return sum(map(share, folders)) / max(len(folders), 1)


def picture(
    folders: Sequence[Folder], running: Sequence[Folder], failed: Mapping[str, str], elapsed: float, before: float
) -> Group:
    """Draw the runs under way and a bar for all of them, with the time that is left."""
    table = Table.grid(padding=(0, 2))
    for folder in running[:SHOWN]:
        stands = folder.progress()
        total = stands.get("total") or 1
        table.add_row(
            Text(printable(folder.run.name), overflow="ellipsis", no_wrap=True),
            ProgressBar(total=total, completed=min(stands.get("done", 0), total), width=20),
            Text(f"{stands.get('done', 0):,} of {total:,}" if stands else "starting"),
            Text(printable(stands.get("note", "")), overflow="ellipsis", no_wrap=True),
        )
    finished = sum(folder.finished for folder in folders)
    now = done_share(folders)
    words = f"{finished} of {len(folders)} runs finished"
    if failed:
        words += f", {len(failed)} failed"
    left = remaining(now, before, elapsed)
    if left is not None:
        words += f", {duration(left)} left"
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=1.0, completed=now, width=30), Text(words))
    more = [Text(f"and {len(running) - SHOWN} more")] if len(running) > SHOWN else []
    return Group(table, *more, bar)


def remaining(now: float, before: float, elapsed: float) -> float | None:
    """Return the seconds that are left if it goes on as it did; None if unknown.

    >>> remaining(now=0.5, before=0.25, elapsed=10.0)
    20.0
    """
    gained = now - before
    return elapsed * (1.0 - now) / gained if gained > 0.01 and elapsed > 1 else None  # starting up tells nothing


def duration(seconds: float) -> str:
    """Write a time for people.

    >>> duration(42), duration(170), duration(8000)
    ('42 s', '3 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def plain_lines(console: Console, folders: Sequence[Folder]) -> Watch:
    """Print a line when a run is finished or fails."""
    seen = {folder.path.name for folder in folders if folder.finished}
    began = time.monotonic()

    def say(name: str, what: str) -> None:
        elapsed = duration(time.monotonic() - began)
        line = f"{len(seen)} of {len(folders)}  {printable(name)}: {printable(what)} ({elapsed})"
        console.print(Text(line), soft_wrap=True)

    def watch(running: Sequence[Folder], failed: Mapping[str, str]) -> None:
        for folder in folders:
            name = folder.path.name
            if name in seen:
                continue
            if folder.finished:
                seen.add(name)
                say(folder.run.name, headline(folder))
            elif name in failed:
                seen.add(name)
                say(folder.run.name, f"failed: {failed[name]}")

    return watch


def headline(folder: Folder) -> str:
    """Return what a finished run came to, in a few words: its result's "headline"."""
    return str(folder.result().get("headline", "finished"))
