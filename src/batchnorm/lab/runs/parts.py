"""Finished parts of a run, kept as lines of its metrics: a run that was killed goes on with the others."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from batchnorm.lab.runs.recorder import Recorder
from batchnorm.records import values_of


class Parts:
    """Finished parts of one run by key; several threads may use it.

    >>> parts = Parts(recorder)  # doctest: +SKIP
    >>> parts.put("10 blocks, BN x5, seed 3", {"accuracy": [0.1, 0.9]})  # doctest: +SKIP
    >>> parts.get("10 blocks, BN x5, seed 3")  # doctest: +SKIP
    {'accuracy': [0.1, 0.9]}

    Values are JSON-able, and come back as JSON has them: a number that is not finite is None.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Read the parts that were finished before the run was stopped or killed."""
        self.recorder, self._lock = recorder, threading.Lock()
        with self.reading():
            self._found = {line["part"]: line["value"] for line in recorder.logged() if "part" in line}

    def reading(self) -> AbstractContextManager[None]:
        """Let parts of another kind than were put here raise one sentence."""
        do = "run it anew with --force, or delete it with batchnorm lab clean"
        return values_of(str(self.recorder.folder.path), do)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Any:
        """Return the value that was put under a key, None if there is none."""
        return self._found.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a finished part; one that is there stays."""
        with self._lock:
            if key in self._found:
                return
            self._found[key] = value
            self.recorder.log(len(self._found), part=key, value=value)
            self.recorder.save(len(self._found), {})

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Record where the run stands; raise `Stopped` if it is to stop."""
        with self._lock:
            self.recorder.progress(done, total, note)
