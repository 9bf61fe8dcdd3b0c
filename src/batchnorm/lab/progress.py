"""What is seen while the race runs: moving bars on a terminal, a plain line per finished stack elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from batchnorm.lab.race import Watch
from batchnorm.lab.train import Progress
from batchnorm.lab.variants import Variant


@contextmanager
def watching(console: Console, steps: int) -> Iterator[Watch]:
    """Give the function that shows the race's progress on this console.

    >>> with watching(Console(), steps=1000) as watch:  # doctest: +SKIP
    ...     run(Options(), watch=watch)
    """
    if not console.is_terminal:
        yield plain_lines(console, steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("best {task.fields[best]:.1%}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        yield moving_bars(bars, steps)


def moving_bars(bars: Bars, steps: int) -> Watch:
    """Show one bar per stack, added when its first step is done.

    >>> moving_bars(Bars(), steps=1000)(stack, 15, Progress(1, 0.0))  # doctest: +SKIP
    """
    tasks: dict[str, TaskID] = {}

    def watch(stack: Sequence[Variant], networks: int, progress: Progress) -> None:
        title = title_of(stack)
        if title not in tasks:
            tasks[title] = bars.add_task(f"{title} ({networks})", total=steps, best=0.0)
        bars.update(tasks[title], completed=progress.step, best=progress.best_accuracy)

    return watch


def plain_lines(console: Console, steps: int) -> Watch:
    """Print a line when a stack is done.

    >>> plain_lines(Console(), steps=800)([named("Inception")], 12, Progress(800, 0.98))  # doctest: +SKIP
    Inception: 12 networks, 800 steps, best accuracy 98.0%, 21 s
    """
    begun: dict[str, float] = {}

    def watch(stack: Sequence[Variant], networks: int, progress: Progress) -> None:
        title = title_of(stack)
        begun.setdefault(title, time.perf_counter())
        if progress.step == steps:
            seconds = time.perf_counter() - begun[title]
            best = f"best accuracy {progress.best_accuracy:.1%}"
            console.print(
                f"{title}: {networks} network{'s' * (networks > 1)}, {steps} steps, {best}, {seconds:.0f} s",
                soft_wrap=True,
            )

    return watch


def title_of(stack: Sequence[Variant]) -> str:
    """Name a stack by its variants.

    >>> title_of([named("BN-x5"), named("BN-x30")])
    'BN-x5, BN-x30'
    """
    return ", ".join(variant.name for variant in stack)
