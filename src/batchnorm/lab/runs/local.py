"""Runs on this machine: a few worker processes, each on its share of the cores."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batchnorm import interrupts
from batchnorm.lab.runs.store import Folder, Store
from batchnorm.lab.runs.worker import STOP

TRIES = 2  # of a run whose worker dies: killed by the system for its memory, or by a fault
PATIENCE = 20.0  # seconds that workers have to write a checkpoint and end
GLANCE = 0.25


@dataclass(frozen=True)
class RunsOutcome:
    """What became of runs: those that are finished, why others failed, and those left for another time."""

    finished: tuple[Folder, ...]
    failed: Mapping[str, str]  # by key, one sentence
    left: tuple[Folder, ...]


def outcome_of(folders: Sequence[Folder], failed: Mapping[str, str]) -> RunsOutcome:
    """Sort runs by what their folders hold.

    >>> outcome_of([], {}).finished
    ()
    """
    finished = tuple(folder for folder in folders if folder.finished)
    failed = {key: why for key, why in failed.items() if key not in {folder.path.name for folder in finished}}
    left = tuple(folder for folder in folders if folder not in finished and folder.path.name not in failed)
    return RunsOutcome(finished, failed, left)


Watch = Callable[[Sequence[Folder], Mapping[str, str]], None]
"""Called a few times a second with the runs that are under way, and why others failed."""


class Worker:
    """One process that carries out runs, one after the other."""

    def __init__(self, store: Store, threads: int, answers: queue.Queue[tuple[Worker, str | None]]) -> None:
        """Start it."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (until it ends)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchnorm.lab.runs.worker", str(store.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then asks the workers to stop
        )
        self.threads = threads
        self.folder: Folder | None = None
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def _listen(self, answers: queue.Queue[tuple[Worker, str | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answers.put((self, line))
        answers.put((self, None))

    def write(self, text: str) -> None:
        """Write a line to it; one that has died says so by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def start(self, folder: Folder) -> None:
        """Let it carry out a run."""
        self.folder = folder
        self.write(f"{folder.path.name} {self.threads}")

    def end(self) -> str:
        """Kill it: every file is whole at every moment. Return its code and the last line it wrote between runs."""
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return f"code {self.process.returncode}" + (f": {lines[-1]}" if lines else "")


def shares(runs: int, workers: int = 0, threads: int = 0, cores: int | None = None) -> tuple[int, int]:
    """Return how many workers to start, and how many threads each has; 0 chooses.

    >>> shares(runs=10, cores=8), shares(runs=2, cores=8), shares(runs=10, threads=4, cores=8)
    ((8, 1), (2, 4), (2, 4))
    """
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    workers = workers or max(1, min(runs, cores // threads if threads else cores))
    workers = min(workers, max(runs, 1))
    return workers, threads or max(1, cores // workers)


def run_locally(
    store: Store,
    folders: Sequence[Folder],
    *,
    workers: int = 0,
    threads: int = 0,
    watch: Watch = lambda running, failed: None,
) -> RunsOutcome:
    """Carry out runs in worker processes; Ctrl-C lets them write checkpoints and end.

    >>> run_locally(store, [store.add(run) for run in runs])  # doctest: +SKIP
    """
    crew = WorkerPool(store, deque(folder for folder in folders if not folder.finished), workers, threads)
    try:
        while crew.busy:
            try:
                crew.take_answer()
                watch([worker.folder for worker in crew.workers if worker.folder], crew.failed)
            except KeyboardInterrupt:
                interrupts.accept()
                if crew.stopping is not None:
                    break  # asked twice
                crew.stop()
    finally:
        crew.end()
    return outcome_of(folders, crew.failed)


class WorkerPool:
    """Workers and the runs that wait for them."""

    def __init__(self, store: Store, waiting: deque[Folder], workers: int, threads: int) -> None:
        """Start as many workers as there are shares, each with its first run."""
        self.store, self.waiting = store, waiting
        self.failed: dict[str, str] = {}
        self.stopping: float | None = None
        self.tries: dict[str, int] = {}
        self.answers: queue.Queue[tuple[Worker, str | None]] = queue.Queue()
        self.workers: list[Worker] = []
        count, self.threads = shares(len(waiting), workers, threads)
        for _ in range(min(count, len(waiting))):
            self.employ()

    @property
    def busy(self) -> bool:
        """Whether there is something to wait for."""
        late = self.stopping is not None and time.monotonic() - self.stopping > PATIENCE
        return not late and any(worker.folder for worker in self.workers)

    def employ(self, worker: Worker | None = None) -> None:
        """Give the next run to a worker, a new one if need be."""
        if self.waiting and self.stopping is None:
            if worker is None:
                worker = Worker(self.store, self.threads, self.answers)
                self.workers.append(worker)
            worker.start(self.waiting.popleft())
        elif worker is not None:
            worker.folder = None
            worker.write(STOP)

    def take_answer(self) -> None:
        """Wait a moment for an answer of any worker, and act on it."""
        try:
            worker, line = self.answers.get(timeout=GLANCE)
        except queue.Empty:
            return
        folder = worker.folder
        if folder is None:
            return
        if line is None:
            self.replace(worker, folder)
            return
        answer = json.loads(line)
        if "error" in answer:
            self.failed[folder.path.name] = answer["error"]
        self.employ(worker)

    def replace(self, worker: Worker, folder: Folder) -> None:
        """Let another worker go on with the run of one that died."""
        self.workers.remove(worker)
        words = worker.end()
        name = folder.path.name
        self.tries[name] = self.tries.get(name, 0) + 1
        if self.tries[name] < TRIES:
            self.waiting.appendleft(folder)
        else:
            self.failed[name] = f"its process died {TRIES} times, the last time with {words}"
        self.employ()

    def stop(self) -> None:
        """Ask all workers to write a checkpoint and end."""
        self.stopping = time.monotonic()
        for worker in self.workers:
            worker.write(STOP)

    def end(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.end()
