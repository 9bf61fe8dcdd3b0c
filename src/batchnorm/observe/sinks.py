"""Sinks for records: memory, a file of lines, TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from batchnorm.errors import BatchNormError
from batchnorm.extras import install
from batchnorm.files import write_atomically
from batchnorm.records import Measurement, RecordFile, header_line, line, read

To = Any  # a path, a SummaryWriter, a sink, or several


class Sink(Protocol):
    """A destination of records. ``readable`` says whether `records` can return them."""

    readable: bool

    def open(self, header: RecordFile, stack: str, start: int) -> tuple[Measurement, ...]:
        """Open the sink. Returns its records; those of ``stack`` from step ``start`` on will be written again."""

    def write(self, measurements: Sequence[Measurement]) -> None:
        """Take some records: those of one step, or what was logged since."""

    def records(self) -> RecordFile | None:
        """Return everything taken so far."""

    def close(self) -> None:
        """End."""


class Memory:
    """Keeps records in this process.

    >>> sink = Memory()
    >>> sink.open(RecordFile("watch", {}, ()), "", 0)
    ()
    >>> sink.write([Measurement("mean", {"step": 0, "layer": ""}, (1.0,))])
    >>> len(sink.records().measurements)
    1
    """

    readable = True

    def __init__(self) -> None:
        self._header = RecordFile("watch", {}, (), machine={})
        self._taken: list[Measurement] = []

    def open(self, header: RecordFile, stack: str, start: int) -> tuple[Measurement, ...]:
        """Begin; of several networks that write here, the first one's configuration is kept."""
        if not self._header.machine:
            self._header = header
        self._taken = _stays(self._taken, stack, start)
        return tuple(self._taken)

    def write(self, measurements: Sequence[Measurement]) -> None:
        """Keep some records."""
        self._taken += measurements

    def records(self) -> RecordFile:
        """Return everything so far."""
        return _with(self._header, self._taken)

    def close(self) -> None:
        """Do nothing."""


class JsonLines:
    """A file that grows by whole lines: the header, then one record a line.

    >>> sink = JsonLines("run.jsonl")  # or watch(model, to="run.jsonl")

    Every ``write`` is one write at the end of the file, so whoever reads while training runs, or after a kill, finds
    whole records (`batchnorm.records.read`). A file that is there is continued: what it holds of other stacks stays,
    and of this stack what is before the first step. So the same command run again replaces its own records only, and
    several networks can share a file, one after the other or at once.
    """

    readable = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def open(self, header: RecordFile, stack: str, start: int) -> tuple[Measurement, ...]:
        """Write the header, or make the file ready to be continued."""
        try:
            return self._open(header, stack, start)
        except OSError as error:
            raise BatchNormError(f"{self.path} cannot be written ({error.strerror})", where="watch") from error

    def _open(self, header: RecordFile, stack: str, start: int) -> tuple[Measurement, ...]:
        if self.path.is_dir():
            raise BatchNormError(f"{self.path} is a folder", where="watch", do="name a file in it, such as watch.jsonl")
        if not self.path.exists() or self.path.stat().st_size == 0:
            write_atomically(self.path, header_line(header))
            return ()
        there = read(self.path)
        if there.command != "watch":
            raise BatchNormError(f"{self.path} holds records of {there.command!r}", where="watch", do="name a new file")
        stays = _stays(there.measurements, stack, start)
        text = header_line(there) + "".join(map(line, stays))
        if len(stays) < len(there.measurements) or not self._ends_whole():
            write_atomically(self.path, text)
        return tuple(stays)

    def _ends_whole(self) -> bool:
        with open(self.path, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read() == b"\n"

    def write(self, measurements: Sequence[Measurement]) -> None:
        """Append some records in one write; if the disk is full, none of them."""
        text = "".join(map(line, measurements)).encode("utf-8")
        if not text:
            return
        # Opened anew, so that a file that was replaced meanwhile is continued, and not the one that is gone.
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            before = os.fstat(handle).st_size
            try:
                written = 0
                while written < len(text):
                    written += os.write(handle, text[written:])
            except BaseException:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)

    def records(self) -> RecordFile:
        """Read the file."""
        return read(self.path)

    def close(self) -> None:
        """Nothing is open between two writes."""


class TensorBoard:
    """Scalars and real histograms for TensorBoard, in a folder or through a SummaryWriter of yours.

    >>> sink = TensorBoard("runs/1")  # watch(model, to=["run.jsonl", sink])

    Tags are "quantity/layer", with "stack/" before them if there is one; a quantity of several numbers has one tag
    each, such as "percentiles/conv1/15". Values outside of a histogram's range are in a bin at its end.
    """

    readable = False

    def __init__(self, folder: str | os.PathLike[str] | Any) -> None:
        self._folder, self._own = folder, isinstance(folder, (str, os.PathLike))
        self._writer: Any = None if self._own else folder

    def open(self, header: RecordFile, stack: str, start: int) -> tuple[Measurement, ...]:
        """Make the writer; TensorBoard itself hides what is repeated from ``start`` on."""
        if self._own and self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise BatchNormError(
                    f"TensorBoard is not installed ({error})", where="watch", do=install("tensorboard")
                ) from error
            self._writer = SummaryWriter(  # type: ignore[no-untyped-call]
                str(self._folder), purge_step=start if start else None
            )
        return ()

    def write(self, measurements: Sequence[Measurement]) -> None:
        """Add some records, and flush."""
        for measurement in measurements:
            self._add(measurement)
        self._writer.flush()

    def _add(self, measurement: Measurement) -> None:
        setting, samples = measurement.setting, measurement.samples
        tag = "/".join(part for part in (setting.get("stack"), measurement.quantity, setting.get("layer")) if part)
        step = setting["step"]
        if measurement.quantity == "histogram":
            limits, counts = histogram_bins(measurement)
            width = limits[1] - limits[0]
            middles = [limit - width / 2 for limit in limits]
            self._writer.add_histogram_raw(
                tag,
                min=limits[0] - width,
                max=limits[-1],
                num=sum(counts),
                sum=sum(c * m for c, m in zip(counts, middles, strict=True)),
                sum_squares=sum(c * m * m for c, m in zip(counts, middles, strict=True)),
                bucket_limits=limits,
                bucket_counts=counts,
                global_step=step,
            )
        elif len(samples) == 1:
            self._writer.add_scalar(tag, samples[0], step)
        else:
            for name, sample in zip(_PARTS.get(measurement.quantity, range(len(samples))), samples, strict=True):
                self._writer.add_scalar(f"{tag}/{name}", sample, step)

    def records(self) -> None:
        """TensorBoard's files are not read back."""

    def close(self) -> None:
        """Close the writer, unless it is the user's."""
        if self._own and self._writer is not None:
            self._writer.close()
            self._writer = None


_PARTS: dict[str, Sequence[str]] = {
    "percentiles": ("15", "50", "85"),
    "gamma": ("mean", "min", "max"),
    "beta": ("mean", "min", "max"),
    "gap": ("mean", "variance"),
}


def histogram_bins(measurement: Measurement) -> tuple[list[float], list[float]]:
    """The upper edges and counts of a histogram's bins, with one bin more at both ends for what lies outside.

    >>> record = Measurement("histogram", {"low": 0.0, "high": 2.0, "under": 7, "over": 9}, (1.0, 2.0))
    >>> histogram_bins(record)
    ([0.0, 1.0, 2.0, 3.0], [7.0, 1.0, 2.0, 9.0])
    """
    setting, counts = measurement.setting, measurement.samples
    low, high = float(setting["low"]), float(setting["high"])
    width = (high - low) / len(counts)
    limits = [low + width * number for number in range(len(counts) + 2)]
    return limits, [float(setting["under"]), *counts, float(setting["over"])]


def sinks_of(to: To) -> list[Sink]:
    """Return the sinks for what the user gave.

    >>> [type(sink).__name__ for sink in sinks_of("run.jsonl")]
    ['JsonLines']
    """
    if to is None:
        return []
    if isinstance(to, (str, os.PathLike)):
        return [JsonLines(to)]
    if isinstance(to, (list, tuple)):
        return [sink for one in to for sink in sinks_of(one)]
    if hasattr(to, "add_histogram_raw"):
        return [TensorBoard(to)]
    if all(hasattr(to, name) for name in ("open", "write", "records", "close")):
        return [to]
    raise BatchNormError(
        f"to is a {type(to).__name__}", where="watch", do="give a path, a SummaryWriter, a sink, or a list of them"
    )


def _stays(measurements: Iterable[Measurement], stack: str, start: int) -> list[Measurement]:
    """Whether a record stays when a run is continued: other stacks, and steps before the start."""
    return [m for m in measurements if m.setting.get("stack", "") != stack or m.setting.get("step", 0) < start]


def _with(header: RecordFile, measurements: Sequence[Measurement]) -> RecordFile:
    return RecordFile(
        header.command, header.configuration, tuple(measurements), header.summary, header.machine, header.format
    )
