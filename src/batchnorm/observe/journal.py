"""Write the records of a run to its sinks. A sink that raises is dropped with a warning, and the run continues."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from batchnorm.errors import BatchNormWarning
from batchnorm.hooks import users_frame
from batchnorm.observe.sinks import Memory, Sink
from batchnorm.records import Measurement, RecordFile

PATIENCE = 1.0  # seconds for which logged values may wait to be written


class Journal:
    """The sinks of one run; a sink that raises is dropped, and the run continues.

    >>> journal = Journal([], RecordFile("watch", {"stack": ""}, ()), start=0)
    >>> journal.open()
    []
    >>> journal.log(Measurement("loss", {"step": 0, "layer": ""}, ()), 2.5)
    >>> journal.write([], step=0)
    >>> [m.samples for m in journal.records().measurements]
    [(2.5,)]

    ``failed`` names what was dropped and why; step numbers are only for these messages.
    """

    def __init__(self, sinks: list[Sink], header: RecordFile, start: int) -> None:
        self.failed: dict[str, str] = {}
        self._sinks, self._header, self._start = sinks, header, start
        self._logged: list[tuple[Measurement, Any]] = []
        self._written = 0.0

    def open(self) -> list[Measurement]:
        """Open every sink, or none. Returns the records that were there before."""
        there: list[Measurement] = []
        for number, sink in enumerate(self._sinks):
            try:
                there += sink.open(self._header, self._stack, self._start)
            except BaseException:
                for opened in self._sinks[:number]:
                    opened.close()
                raise
        self._keep_readable()
        self._written = time.monotonic()
        return there

    def log(self, measurement: Measurement, value: Any) -> None:
        """Keep a number without reading it, because reading a value on a GPU waits for it."""
        self._logged.append((measurement, value))

    @property
    def waits_too_long(self) -> bool:
        """Whether logged values should be written now."""
        return time.monotonic() - self._written > PATIENCE

    def write(self, found: list[Measurement], step: int) -> None:
        """Write records and logged values to the sinks."""
        logged, self._logged = self._logged, []
        found = found + [Measurement(m.quantity, m.setting, (float(value),), m.unit) for m, value in logged]
        self._written = time.monotonic()
        if found:
            for sink in list(self._sinks):
                self._safely(sink, lambda sink=sink: sink.write(found), step)  # type: ignore[misc]

    def close(self, step: int) -> None:
        """Close every sink."""
        for sink in list(self._sinks):
            self._safely(sink, sink.close, step)

    def records(self) -> RecordFile:
        """Read everything that was written so far."""
        found = next((sink.records() for sink in self._sinks if sink.readable), None)
        return self._header if found is None else found

    def fail(self, what: str, error: Exception, step: int) -> None:
        """Disable what failed, and warn once."""
        self.failed[what] = f"{type(error).__name__}: {error}"
        self.warn(f"watch: {what!r} failed at step {step} and is disabled from now on ({self.failed[what]})")

    def warn(self, text: str) -> None:
        """Warn at the user's own line."""
        warnings.warn(text, BatchNormWarning, stacklevel=users_frame())

    @property
    def _stack(self) -> str:
        return str(self._header.configuration["stack"])

    def _keep_readable(self) -> None:
        if not any(sink.readable for sink in self._sinks):
            memory = Memory()
            memory.open(self._header, self._stack, self._start)
            self._sinks.append(memory)

    def _safely(self, sink: Sink, act: Callable[[], None], step: int) -> None:
        try:
            act()
        except Exception as error:
            self._sinks.remove(sink)
            self._keep_readable()
            self.fail(type(sink).__name__, error, step)
