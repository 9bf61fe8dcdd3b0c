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

import torch

from batchnorm.lab.curves import Curve, Member, best_accuracy, curve_of
from batchnorm.lab.shelf import REPLACE, Shelf
from batchnorm.lab.train import Progress
from batchnorm.records import values_of

LARGEST_PART = 10
GLANCE = 0.1  # seconds between two looks at whether the user wants to stop

TrainPart = Callable[[Sequence[Member], Callable[[Progress], None]], list[Curve]]


class Stopped(Exception):
    """Training was ended by a stop elsewhere."""


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
            for part in done:
                part.result()


class Crew:
    """Threads that train parts of stacks, and stop together.

    >>> with crew(threads=2) as workers:  # doctest: +SKIP
    ...     heat = workers.start(members, train_part)
    ...     heat.wait()
    """

    def __init__(self, pool: ThreadPoolExecutor, shelf: Shelf | None = None) -> None:
        """Use the threads of this pool, and what a shelf has of an earlier start."""
        self.pool, self.stop, self.lock = pool, threading.Event(), threading.Lock()
        self.shelf = shelf

    def start(
        self,
        members: Sequence[Member],
        train_part: TrainPart,
        watch: Callable[[Progress], None] | None = None,
        *,
        largest: int = LARGEST_PART,
        name: str = "",
        steps: int = 0,
    ) -> Heat:
        """Begin a stack; ``watch`` sees the mean step of its networks and the best accuracy of any.

        A part of a stack with a ``name`` is kept on the shelf when it is done, and taken from there if it was done
        before; ``steps`` is then where it stands.
        """
        heat = Heat(members)
        seen: dict[int, tuple[int, Progress]] = {}

        def run(index: int, part: Sequence[Member]) -> tuple[list[Curve], float]:
            def look(progress: Progress) -> None:
                if self.stop.is_set():
                    raise Stopped
                with self.lock:
                    seen[index] = len(part), progress
                    steps = sum(size * each.step for size, each in seen.values())
                    best = max(each.best_accuracy for _, each in seen.values())
                    if watch is not None:
                        watch(Progress(steps // len(members), best))

            begun = time.perf_counter()
            key = f"{name}: {', '.join(map(str, part))}"
            kept = self.shelf.get(key) if self.shelf is not None and name else None
            try:
                if self.shelf is not None and kept is not None:
                    with values_of(str(self.shelf.path), REPLACE):
                        curves = [curve_of(fields) for fields in kept["curves"]]
                        best, seconds = max(map(best_accuracy, curves), default=0.0), float(kept["seconds"])
                    look(Progress(steps, best))
                    return curves, seconds
                curves, seconds = train_part(part, look), time.perf_counter() - begun
                if self.shelf is not None and name:
                    self.shelf.put(key, {"curves": [asdict(curve) for curve in curves], "seconds": seconds})
                return curves, seconds
            except BaseException:
                self.stop.set()
                raise

        heat.parts = [self.pool.submit(run, index, part) for index, part in enumerate(even_parts(members, largest))]
        return heat


@contextmanager
def crew(threads: int, shelf: Shelf | None = None) -> Iterator[Crew]:
    """Open a crew; torch computes on one thread in each of its workers, and as before afterwards.

    >>> with crew(threads=2) as workers:
    ...     workers.stop.is_set()
    False
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            workers = Crew(pool, shelf)
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
