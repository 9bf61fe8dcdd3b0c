"""Several processes that carry out one run together, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from batchnorm.lab.runs.display import headline
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.experiments import function_of
from batchnorm.lab.runs.recorder import Saved
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import Store


def asked() -> bool:
    """Return whether torchrun started this process as one of several.

    >>> asked()
    False
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[None]:
    """Join the other processes for the time of the block: over nccl where there are GPUs, else over gloo."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def place() -> tuple[int, int]:
    """Return this process's rank, and how many processes there are.

    >>> place()
    (0, 1)
    """
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def total(value: float) -> float:
    """Return the sum of a number over all processes.

    >>> total(3.0)
    3.0
    """
    if place()[1] == 1:
        return value
    tensor = torch.tensor(float(value), dtype=torch.float64)
    if torch.cuda.is_available():
        tensor = tensor.cuda()
    dist.all_reduce(tensor)
    return float(tensor)


def mean(value: float) -> float:
    """Return the mean of a number over all processes.

    >>> mean(3.0)
    3.0
    """
    return total(value) / place()[1]


class Follower:
    """What the processes other than the first have for a recorder: they start from its checkpoint and write nothing."""

    def __init__(self, threads: int, saved: Saved | None) -> None:
        """Begin where the first process does."""
        self.threads, self._saved = threads, saved

    def restored(self) -> Saved | None:
        """Return the checkpoint that the first process read."""
        return self._saved

    def log(self, step: int, **values: Any) -> None:
        """Do nothing."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Do nothing."""

    def due(self) -> bool:
        """Return False."""
        return False

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], **facts: Any) -> None:
        """Do nothing."""


def carry_out_together(store: Store, runs: Sequence[LabRun], threads: int, say: Callable[[str], None]) -> None:
    """Carry out runs one after the other, each in all processes; the first one records them.

    >>> carry_out_together(Store(), runs, threads=1, say=print)  # doctest: +SKIP
    """
    for run in runs:
        if place()[0]:
            if not shared(None):
                function_of(run.experiment)(run.options, Follower(threads, shared(None)))  # type: ignore[arg-type]
            continue
        folder = store.add(run)
        if not shared(folder.finished):
            execute(folder, threads=threads, begun=lambda recorder: shared(recorder.restored()))
        say(f"{run.name}: {headline(folder)}")


def shared(value: Any) -> Any:
    """Return on every process what the first one gives."""
    sent = [value]
    dist.broadcast_object_list(sent)
    return sent[0]
