"""Stacks of networks on a few threads: each thread trains a part of a stack by itself, on one core.

Threads that share a small convolution wait for each other thousands of times a second, and on a busy machine
each wait can cost a time slice. Members are independent, so a stack is cut into parts that never wait.
The parts do not depend on the number of threads, and neither do the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from batchnorm.lab.curves import Curve, Member, best_accuracy, curve_of
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.runs.recorder import Stopped
from batchnorm.lab.train import Progress

LARGEST_PART = 10
GLANCE = 0.1  # seconds between two looks at whether the user wants to stop

TrainPart = Callable[[Sequence[Member], Callable[[Progress], None]], list[Curve]]


@dataclass(frozen=True)
class Job:
    """Networks that are trained at the same time, of one depth: ``arms`` are their variants, which have names."""

    blocks: int
    arms: tuple[Any, ...]
    members: tuple[Member, ...]

    @property
    def title(self) -> str:
        """What it is called while it runs."""
        names = ", ".join(arm.name for arm in self.arms)
        return f"{self.blocks} blocks: {names}" if self.blocks else names

    @property
    def size(self) -> int:
        """How much one step of all its networks counts in the progress of the whole."""
        return len(self.members) * max(self.blocks, 1)


Watch = Callable[[Job, Progress], None]
"""Called after every step with the job in training and where it stands."""


@dataclass
class Heat:
    """One stack under way."""

    members: Sequence[Member]
    parts: list[Future[tuple[list[Curve], float]]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every part has run to its end."""
        return all(part.done() and not part.cancelled() and part.exception() is None for part in self.parts)

    def curves(self) -> list[Curve]:
        """The curves of all members, in order."""
        return [curve for part in self.parts for curve in part.result()[0]]

    def core_seconds(self) -> float:
        """The time of all parts, added."""
        return sum(part.result()[1] for part in self.parts)

    def wait(self) -> None:
        """Wait for the end; whatever was raised in a part is raised here."""
        while not self.finished:
            done, _ = wait(self.parts, timeout=GLANCE, return_when=FIRST_EXCEPTION)
            # Parts that were stopped because another one failed come last: the cause is what is raised.
            for part in sorted(done, key=lambda part: isinstance(part.exception(), Stopped)):
                part.result()


class Crew:
    """Threads that train parts of stacks, and stop together.

    >>> with crew(threads=2) as workers:  # doctest: +SKIP
    ...     heat = workers.start(Job(2, (PLAIN,), members), train_part, steps=800)
    ...     heat.wait()
    """

    def __init__(
        self, pool: ThreadPoolExecutor, watch: Watch | None = None, parts: Parts | None = None, total: int = 0
    ) -> None:
        """Use the threads of this pool, and ``parts`` that were finished before; ``total`` is the size of all jobs."""
        self.pool, self.stop, self.lock = pool, threading.Event(), threading.Lock()
        self.watch, self.parts, self.total = watch, parts, total
        self.done: dict[Job, int] = {}

    def see(self, job: Job, progress: Progress) -> None:
        """Record where a job stands, and show it."""
        if self.parts is not None:
            self.done[job] = progress.step * job.size
            self.parts.progress(min(sum(self.done.values()), self.total), self.total, job.title)
        if self.watch is not None:
            self.watch(job, progress)

    def start(self, job: Job, train_part: TrainPart, *, steps: int, largest: int = LARGEST_PART) -> Heat:
        """Begin to train the networks of a job; its progress is their mean step and the best accuracy of any.

        A part that is done is kept; one that was done before the run was killed is not trained again.
        """
        heat = Heat(job.members)
        seen: dict[int, tuple[int, Progress]] = {}

        def run(index: int, part: Sequence[Member]) -> tuple[list[Curve], float]:
            def look(progress: Progress) -> None:
                if self.stop.is_set():
                    raise Stopped
                with self.lock:
                    seen[index] = len(part), progress
                    step = sum(size * each.step for size, each in seen.values()) // len(job.members)
                    self.see(job, Progress(step, max(each.best_accuracy for _, each in seen.values())))

            begun = time.perf_counter()
            key = f"{job.title}: {', '.join(map(str, part))}"
            kept = self.parts.get(key) if self.parts is not None else None
            try:
                if self.parts is not None and kept is not None:
                    with self.parts.reading():
                        curves = [curve_of(fields) for fields in kept["curves"]]
                        best, seconds = max(map(best_accuracy, curves), default=0.0), float(kept["seconds"])
                    look(Progress(steps, best))
                    return curves, seconds
                curves, seconds = train_part(part, look), time.perf_counter() - begun
                if self.parts is not None:
                    self.parts.put(key, {"curves": [asdict(curve) for curve in curves], "seconds": seconds})
                return curves, seconds
            except BaseException:
                self.stop.set()
                raise

        heat.parts = [self.pool.submit(run, index, part) for index, part in enumerate(even_parts(job.members, largest))]
        return heat


@contextmanager
def crew(threads: int, watch: Watch | None = None, parts: Parts | None = None, total: int = 0) -> Iterator[Crew]:
    """Open a crew; torch computes on one thread in each of its workers, and as before afterwards.

    >>> with crew(threads=2) as workers:
    ...     workers.stop.is_set()
    False
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            workers = Crew(pool, watch, parts, total)
            try:
                yield workers
            except BaseException:
                workers.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)


def even_parts(members: Sequence[Member], largest: int = LARGEST_PART) -> list[Sequence[Member]]:
    """Cut members into as few parts as the largest size allows, none more than one longer than another.

    >>> [len(part) for part in even_parts(range(25))]
    [9, 8, 8]
    """
    count = -(-len(members) // largest)
    sizes = [len(members) // count + (index < len(members) % count) for index in range(count)]
    return [members[sum(sizes[:index]) : sum(sizes[: index + 1])] for index in range(count)]
