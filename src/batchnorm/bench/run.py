"""All cells, one after the other; an interrupt keeps what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchnorm import interrupts
from batchnorm.bench.cases import Case
from batchnorm.bench.cell import CellResult, run_cell
from batchnorm.bench.contenders import CONTENDERS
from batchnorm.memory import keep_freed_memory
from batchnorm.records import Measurement


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    >>> RunResult((), (), done=0, interrupted=True).done
    0
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]
    done: int
    interrupted: bool = False


def present_contenders(compiled: str, peers: bool) -> tuple[list[str], list[str]]:
    """The contenders that can run here, and a reason for each that was asked for and cannot.

    >>> present_contenders("off", peers=False)
    (['torch', 'batchnorm', 'floor'], [])
    """
    names, reasons = [], []
    for name, contender in CONTENDERS.items():
        if (contender.compiled and compiled == "off") or (contender.peer and not peers):
            continue
        missing = contender.missing()
        if missing:
            reasons.append(f"{name}: {missing}")
        else:
            names.append(name)
    return names, reasons


def contenders_of(case: Case, names: Sequence[str], compiled: str) -> list[str]:
    """Who runs in this case: what is compiled only where its target is, unless all cells were asked for.

    >>> contenders_of(Case((2, 3), "contiguous", "bn", "eval"), ["torch", "torch.compile"], "target")
    ['torch']
    """
    aimed = compiled == "all" or (case.operation == "bn+relu" and case.pass_name == "train")
    return [name for name in names if aimed or not CONTENDERS[name].compiled]


def run_cases(
    cases: Sequence[Case],
    names: Sequence[str],
    rounds: int,
    *,
    compiled: str = "target",
    on_start: Callable[[Case], None] = lambda case: None,
    on_done: Callable[[Case], None] = lambda case: None,
    cell: Callable[..., CellResult] = run_cell,
    keep: Callable[[], bool] = keep_freed_memory,
) -> RunResult:
    """Measure the cases in order, those with kept memory last; an interrupt returns the finished ones.

    >>> run_cases([], [], rounds=1).measurements
    ()
    """
    measurements: list[Measurement] = []
    notes: list[str] = []
    done = 0
    kept: bool | None = None
    try:
        for case in sorted(cases, key=lambda case: case.memory == "kept"):
            on_start(case)
            if case.memory == "kept":
                kept = keep() if kept is None else kept
                if not kept:
                    notes.append("freed memory cannot be kept with this C library, so those cells were not measured")
                    break
            result = cell(case, contenders_of(case, names, compiled), rounds)
            measurements += result.measurements
            notes += result.notes
            done += 1
            on_done(case)
    except KeyboardInterrupt:
        interrupts.accept()
        return RunResult(tuple(measurements), tuple(notes), done, interrupted=True)
    return RunResult(tuple(measurements), tuple(notes), done)


@contextmanager
def threads_set(threads: int | None) -> Iterator[int]:
    """Give torch this many threads inside the block (its own choice by default) and say how many there are.

    >>> with threads_set(1) as threads:
    ...     threads
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
