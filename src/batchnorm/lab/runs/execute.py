"""Carry out one run in this process: what workers, Ray and torchrun do."""

from __future__ import annotations

import os
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from batchnorm import __version__, kernels
from batchnorm.errors import BatchNormError
from batchnorm.lab.runs.experiments import function_of
from batchnorm.lab.runs.recorder import Recorder, Stopped
from batchnorm.lab.runs.store import Folder, now
from batchnorm.records import machine


def execute(
    folder: Folder,
    *,
    threads: int = 1,
    stop: Callable[[], bool] = lambda: False,
    begun: Callable[[Recorder], object] = lambda recorder: None,
    by: Callable[[Mapping[str, Any], Recorder], Mapping[str, Any]] | None = None,
) -> bool:
    """Carry out a run from where it stands, unless it is finished; return whether it has a result now.

    >>> execute(Store("batchnorm-lab").add(runs_of("train", ["steps=100"])[0]))  # doctest: +SKIP
    True

    ``begun`` is called with the recorder before the experiment; ``by`` carries it out in place of its own function.
    A run that goes on uses as many threads as when it began: sums in another order would give other numbers.
    """
    with folder.opened():
        if folder.finished:
            return True
        folder.remove_leftovers()
        attempts = folder.attempts()
        threads = attempts[0].get("threads", threads) if attempts else threads
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        clock, processor = time.perf_counter(), time.process_time()
        attempts.append({"started": now(), "threads": threads, **environment()})
        folder.write("environment.json", attempts)
        try:
            recorder = Recorder(folder, threads=threads, stop=stop)
            begun(recorder)
            result = (by or function_of(folder.run.experiment))(folder.run.options, recorder)
        except Stopped:
            return False
        except Exception as error:
            sentence = str(error) if isinstance(error, BatchNormError) else f"{type(error).__name__}: {error}"
            folder.write("failure.json", {"error": sentence, "traceback": traceback.format_exc(), "at": now()})
            raise
        finally:
            torch.set_num_threads(before)
            attempts[-1]["seconds"] = round(time.perf_counter() - clock, 3)
            attempts[-1]["cpu_seconds"] = round(time.process_time() - processor, 3)
            folder.write("environment.json", attempts)
        (folder.path / "failure.json").unlink(missing_ok=True)
        folder.write("result.json", result)
        return True


def environment() -> dict[str, Any]:
    """Return where a run runs: versions, machine, kernel, commit, process.

    >>> environment()["torch"]  # doctest: +SKIP
    '2.13.0'
    """
    return {
        **machine(),
        "batchnorm": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "kernel": kernels.describe(),
        "commit": commit(),
        "process": os.getpid(),
    }


def commit() -> str:
    """Return the git commit that this package runs from, with a + if files were changed; empty if there is none.

    >>> len(commit()) in (0, 40, 41)
    True
    """
    here = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A package in an environment inside some other checkout is not of its commit.
        if not git("ls-files", Path(__file__).name):
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
