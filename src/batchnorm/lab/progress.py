"""Progress of networks in training: one moving bar on a terminal, a line for each finished job elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from batchnorm.lab.heat import Job, Watch
from batchnorm.lab.train import Progress
from batchnorm.progress import QUIET, level, shows_bars


@contextmanager
def watching(console: Console, steps: int, total: int) -> Iterator[Watch]:
    """Give the function that shows the progress on this console; ``total`` is what `planned` returns.

    >>> with watching(Console(), steps=1500, total=planned(DepthSettings())) as watch:  # doctest: +SKIP
    ...     run(DepthSettings(), watch=watch)
    """
    if level() == QUIET:
        yield lambda job, progress: None
        return
    if not shows_bars(console):
        yield plain_lines(console, steps)
        return
    columns = (
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        TextColumn("best {task.fields[best]:.1%}"),
    )
    with Bars(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        yield moving_bar(bars, total)


def moving_bar(bars: Bars, total: int) -> Watch:
    """Show one bar for everything, and the job that moved last.

    >>> moving_bar(Bars(), total=100)(Job(2, (), ()), Progress(1, 0.0))
    """
    task = bars.add_task("", total=total, best=0.0)
    done: dict[Job, int] = {}

    def watch(job: Job, progress: Progress) -> None:
        done[job] = progress.step * job.size
        bars.update(task, completed=sum(done.values()), description=job.title, best=progress.best_accuracy)

    return watch


def plain_lines(console: Console, steps: int) -> Watch:
    """Print a line when a job is done.

    >>> plain_lines(Console(), steps=1500)(job, Progress(1500, 0.9))  # doctest: +SKIP
    10 blocks: without BN: 27 networks, best accuracy 90.0%, 8 s
    """
    begun = time.perf_counter()
    done: set[Job] = set()

    def watch(job: Job, progress: Progress) -> None:
        if progress.step == steps and job not in done:
            done.add(job)
            count, best = len(job.members), f"best accuracy {progress.best_accuracy:.1%}"
            seconds = f"{time.perf_counter() - begun:.0f} s"
            console.print(f"{job.title}: {count} network{'s' * (count > 1)}, {best}, {seconds}", soft_wrap=True)

    return watch
