"""Frozen records that carry every result from the code that measured it to the code that draws it."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchnorm.errors import BatchNormError, first_line
from batchnorm.files import read_bytes, write_atomically
from batchnorm.present import Listing, Tabled

FORMAT = 1
NEEDED = ("format", "command", "configuration", "measurements")  # in every file of records


@dataclass(frozen=True)
class Measurement:
    """One measured quantity: what, in which setting, the samples, their unit.

    >>> Measurement("time", {"shape": "32x64", "contender": "torch"}, (1.0, 3.0, 2.0), "ms").median
    2.0
    """

    quantity: str
    setting: Mapping[str, Any]
    samples: tuple[float, ...]
    unit: str = ""

    @property
    def median(self) -> float:
        """The middle sample (NaN of none).

        >>> Measurement("steps", {}, (3.0, 1.0, 2.0, 9.0)).median
        2.5
        """
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The sample at rank ``q`` of 0..1, interpolated between neighbours.

        >>> Measurement("steps", {}, (0.0, 10.0)).quantile(0.25)
        2.5
        """
        if not self.samples:
            return float("nan")
        ordered = sorted(self.samples)
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        if place == low or ordered[low] == ordered[high]:  # also where the next one is infinite
            return ordered[low]
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class RecordFile:
    """Everything one command measured, with the machine it ran on.

    >>> RecordFile.from_json(RecordFile("bench", {"threads": 2}, ()).to_json()).command
    'bench'
    """

    command: str
    configuration: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    summary: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())
    format: int = FORMAT

    def __repr__(self) -> str:
        """Say what is in it, on one line: a run has thousands of numbers.

        >>> RecordFile("watch", {}, (Measurement("mean", {}, (0.5,)), Measurement("mean", {}, (0.25,))))
        RecordFile('watch', 2 measurements of mean)
        """
        quantities = ", ".join(dict.fromkeys(m.quantity for m in self.measurements))
        of = f" of {quantities}" if quantities else ""
        return f"RecordFile({self.command!r}, {len(self.measurements)} measurements{of})"

    def to_json(self) -> str:
        """Serialise; numbers that JSON lacks (NaN, infinity) become null.

        >>> '"command": "race"' in RecordFile("race", {}, ()).to_json()
        True
        """
        return json.dumps(plain(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RecordFile:
        """Read what ``to_json`` wrote.

        >>> RecordFile.from_json('{"command": "race", "configuration": {}, "measurements": [], "format": 1}').command
        'race'
        >>> RecordFile.from_json("{}")
        Traceback (most recent call last):
        batchnorm.errors.BatchNormError: this is not a batchnorm record file (it has no format, command, \
configuration, measurements); give what a command wrote with --json, what check --format json printed, or what watch \
recorded
        """
        if not text.strip():
            raise _no_records("it is empty")
        try:
            return checked(parsed(text))
        except ValueError as error:
            if isinstance(error, BatchNormError):
                raise
            raise _no_records(str(error)) from error

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the records atomically and return the path.

        >>> RecordFile("race", {}, ()).write("race.json")  # doctest: +SKIP
        PosixPath('race.json')
        """
        return write_atomically(path, self.to_json() + "\n")


def _no_records(why: str) -> BatchNormError:
    return BatchNormError(
        f"this is not a batchnorm record file ({why})",
        do="give what a command wrote with --json, what check --format json printed, or what watch recorded",
    )


@dataclass(frozen=True)
class Change:
    """One thing that a verb changed in a model: in which module, what, from what, to what.

    >>> print(Change("layer1.bn1", "update", None, False))
    layer1.bn1: update None -> False
    """

    path: str
    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self._step()}"

    def _step(self) -> str:
        return f"{self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Certificate:
    """How far the outputs of a changed model are from those of the model as it was, at most.

    >>> print(Certificate(1.5e-6, 3e-7, 1e-4, 3))
    outputs differ by at most 1.5e-06 (3e-07 of the largest) on 3 inputs; allowed: 0.0001 of the largest
    >>> print(Certificate(1.5, 0.3, math.inf, 3))
    outputs differ by at most 1.5 (0.3 of the largest) on 3 inputs; they are not expected to be equal

    ``tolerance`` is infinite where a change cannot keep the function: then the difference is measured, not limited.
    """

    absolute: float
    relative: float
    tolerance: float
    inputs: int
    what: str = "outputs"

    def __str__(self) -> str:
        return (
            f"{self.what} differ by at most {self.absolute:.2g} ({self.relative:.2g} of the largest) on {self.inputs} "
            f"input{'' if self.inputs == 1 else 's'}; "
            + (f"allowed: {self.tolerance:g} of the largest" if self.kept else "they are not expected to be equal")
        )

    @property
    def kept(self) -> bool:
        """Whether the change was to keep the function, and so was held to a tolerance.

        >>> Certificate(0.0, 0.0, 1e-4, 3).kept
        True
        """
        return self.tolerance != math.inf


SEVERITIES = ("error", "warning", "advice")
HELD = "held back: "  # begins the reason why a rule measured a difference and does not report it


@dataclass(frozen=True)
class Finding:
    """One thing the doctor found: which rule, in which module, in one sentence, with the numbers that show it.

    >>> print(Finding("BN203", "poisoned-statistics", "error", "bn1", "running_var has 1 NaN", {"nan": 1}))
    bn1: BN203 poisoned-statistics: running_var has 1 NaN
    """

    code: str
    name: str
    severity: str
    path: str
    sentence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    repair: str = ""
    fix: str = "none"  # what `fix` can do about it: "safe", "unsafe" or "none"
    step: int | None = None  # of a training run: the optimiser steps that were done when it happened

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.code} {self.name}: {self.sentence}"


@dataclass(frozen=True)
class Report(Tabled):
    """Everything a verb changed, and every place it left alone, with the reason.

    >>> changes = (Change("bn1", "update", None, False), Change("bn1", "learn", True, False))
    >>> print(Report(changes, {"norm": "a GroupNorm keeps no running statistics"}))
    1 module changed
      bn1: update None -> False, learn True -> False
    1 left alone
      norm: a GroupNorm keeps no running statistics
    """

    changes: tuple[Change, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    certificate: Certificate | None = None
    gradients: Certificate | None = None  # of verbs after which training goes on

    def to_json(self) -> str:
        """Serialise what was done and what was measured.

        >>> '"what": "update"' in Report((Change("bn1", "update", None, False),)).to_json()
        True
        """
        return json.dumps(plain(asdict(self)), indent=1, allow_nan=False, default=str)

    def tables(self) -> list[Listing]:
        """The tables of what changed and of what was left alone.

        >>> Report((Change("bn1", "update", None, False),)).tables()[0].rows
        (('bn1', 'update', 'None', 'False'),)
        """
        found: list[Listing] = []
        if self.changes:
            rows, above = [], None
            for change in self.changes:  # a path that stands in the row above is not repeated
                name = "" if change.path == above else change.path or "the model"
                rows.append((name, change.what, str(change.before), str(change.after)))
                above = change.path
            count = len(self.paths)
            title = f"{count} module{'s' * (count != 1)} changed"
            found.append(Listing(title, ("module", "what", "before", "after"), tuple(rows)))
        if self.left:
            left = tuple((path or "the model", reason) for path, reason in self.left.items())
            found.append(Listing(f"{len(left)} left alone", ("module", "why"), left))
        return found

    def lines(self) -> list[str]:
        """Return the lines below the tables: whether anything changed, and how far outputs and gradients differ.

        >>> Report().lines()
        ['no module changed']
        """
        measured = [str(each) for each in (self.certificate, self.gradients) if each is not None]
        return measured if self.changes else ["no module changed", *measured]

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules that changed, each once, in order.

        >>> Report((Change("b", "x", 0, 1), Change("b", "y", 0, 1), Change("a", "x", 0, 1))).paths
        ('b', 'a')
        """
        return tuple(dict.fromkeys(change.path for change in self.changes))

    def __str__(self) -> str:
        paths = self.paths
        lines = [f"{len(paths) or 'no'} module{'' if len(paths) == 1 else 's'} changed"]
        for path in paths:
            steps = ", ".join(change._step() for change in self.changes if change.path == path)
            lines.append(f"  {path or 'the model'}: {steps}")
        if self.left:
            lines.append(f"{len(self.left)} left alone")
            lines += [f"  {path or 'the model'}: {reason}" for path, reason in self.left.items()]
        lines += [str(measured) for measured in (self.certificate, self.gradients) if measured is not None]
        return "\n".join(lines)


def read(path: str | os.PathLike[str]) -> RecordFile:
    """Read a file of records: what a command wrote at its end, or what ``watch`` writes line by line.

    >>> read("run.jsonl").command  # doctest: +SKIP
    'watch'

    A file of lines can be read while it grows, and after a kill: a last line that was cut off is left out.
    """
    content = read_bytes(path)
    lines = content.split(b"\n")
    try:
        first = parsed(lines[0])
        in_lines = isinstance(first, dict) and "measurements" not in first
    except ValueError:  # a RecordFile is written over many lines
        in_lines = False
    try:
        return _from_lines(first, lines) if in_lines else RecordFile.from_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BatchNormError(_no_records("not text").problem, where=os.fspath(path)) from error
    except BatchNormError as error:
        raise BatchNormError(error.problem, where=os.fspath(path), do=error.do) from error


def header_line(records: RecordFile) -> str:
    """The first line of a file of lines: everything but the measurements.

    >>> header_line(RecordFile("watch", {}, (), machine={}))
    '{"command": "watch", "configuration": {}, "summary": {}, "machine": {}, "format": 1}\\n'
    """
    fields = {key: value for key, value in vars(records).items() if key != "measurements"}
    return json.dumps(plain(fields), allow_nan=False) + "\n"


def line(measurement: Measurement) -> str:
    """One measurement as a line of a file of lines.

    >>> line(Measurement("mean", {"step": 0, "layer": "0"}, (1.5, float("nan"))))
    '{"quantity": "mean", "setting": {"step": 0, "layer": "0"}, "samples": [1.5, null], "unit": ""}\\n'
    """
    return json.dumps(plain(vars(measurement)), allow_nan=False) + "\n"


def _from_lines(header: dict[str, Any], lines: list[bytes]) -> RecordFile:
    """What a file of lines holds; only the last line, the one without an end, may be broken."""
    measurements = []
    for number, text in enumerate(lines[1:], start=2):
        if not text.strip():
            continue
        try:
            measurements.append(_measurement(parsed(text)))
        except ValueError as error:
            if number == len(lines):
                break
            raise BatchNormError(f"line {number} is not a measurement ({error})") from error
    return replace(checked({**header, "measurements": []}), measurements=tuple(measurements))


# ---- the schema of what is read


def parsed(text: str | bytes) -> Any:
    """Parse JSON that may come from anywhere; raises ``ValueError`` for whatever cannot be read.

    >>> parsed("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(fields: Any) -> RecordFile:
    """Make records of what a file holds; raise `BatchNormError` if anything in it has another type than was written.

    >>> checked({"format": 1, "command": 3, "configuration": {}, "measurements": []})
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: this is not a batchnorm record file (command is an int, not a str); give what a \
command wrote with --json, what check --format json printed, or what watch recorded
    """
    if isinstance(fields, dict) and fields.get("format", FORMAT) != FORMAT:
        raise BatchNormError(f"these records have format {fields['format']!r:.40}, this version reads {FORMAT}")
    try:
        typed(fields, _RECORDS, "it", NEEDED)
        return RecordFile(**{**fields, "measurements": tuple(map(_measurement, fields["measurements"]))})
    except ValueError as error:
        raise _no_records(str(error)) from error


@contextmanager
def values_of(what: str, do: str = "give the file as it was written") -> Iterator[None]:
    """Turn what goes wrong with values of another kind than were written into one sentence.

    >>> with values_of("race.json"):
    ...     {}["rate"]
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: race.json: a value is missing or of another kind than was written \
(KeyError: 'rate'); give the file as it was written
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, BatchNormError):
            raise
        why = f"a value is missing or of another kind than was written ({type(error).__name__}: {first_line(error)})"
        raise BatchNormError(why, where=what, do=do) from error


def typed(fields: Any, types: Mapping[str, type], what: str, needed: Iterable[str] = ()) -> None:
    """Raise ``ValueError`` unless a dictionary has only fields of these types, the needed ones, and plain values.

    >>> typed({"rate": "4"}, {"rate": float}, "the setting")
    Traceback (most recent call last):
    ValueError: rate is a str, not a float
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{what} is {_article(fields)}, not a dictionary")
    missing = [key for key in needed if key not in fields]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    for key, value in fields.items():
        if key not in types:
            raise ValueError(f"{what} has {key!r:.40}, which is unknown")
        if not isinstance(value, types[key]) or (types[key] is int and isinstance(value, bool)):
            raise ValueError(f"{key} is {_article(value)}, not {_article(types[key]())}")
        check_plain(value, key)


def check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Raise ``ValueError`` if a value of JSON is nested too deeply to be handled, or has an integer beyond 64 bits.

    >>> check_plain({"a": [10**30]}, "summary")
    Traceback (most recent call last):
    ValueError: summary has an integer of more than 64 bits
    """
    if depth > DEEPEST:
        raise ValueError(f"{what} is nested too deeply")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{what} has an integer of more than 64 bits")
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            check_plain(inner, what, depth + 1)


def _measurement(fields: Any) -> Measurement:
    typed(fields, _MEASUREMENT, "a measurement", ("quantity", "setting", "samples"))
    setting = fields["setting"]
    typed({key: setting[key] for key in _SETTING.keys() & setting.keys()}, _SETTING, "a setting")
    samples = fields["samples"]
    wrong = next((s for s in samples if s is not None and type(s) not in (int, float)), None)
    if wrong is not None:
        raise ValueError(f"a sample is {_article(wrong)}, not a number")
    return Measurement(**{**fields, "samples": tuple(float("nan") if s is None else s for s in samples)})


def _article(value: Any) -> str:
    name = "None" if value is None else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}" if value is not None else name


DEEPEST = 32
_RECORDS: dict[str, type] = {
    "format": int, "command": str, "configuration": dict, "measurements": list, "summary": dict, "machine": dict,
}  # fmt: skip
_MEASUREMENT: dict[str, type] = {"quantity": str, "setting": dict, "samples": list, "unit": str}
_SETTING: dict[str, type] = {"layer": str, "stack": str}


def machine() -> dict[str, Any]:
    """Say on what the figures were measured.

    >>> sorted(machine())[:2]
    ['cores', 'processor']
    """
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def plain(value: Any) -> Any:
    """Turn tuples into lists and non-finite floats into null, all the way down."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return value
