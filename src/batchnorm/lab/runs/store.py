"""The store: a folder of runs, each a folder named after its key.

    KEY/run.json                what was asked: experiment, options, name, when
    KEY/environment.json        where it ran: versions, cores, kernel, commit, threads; one entry for every start
    KEY/metrics.jsonl           what was measured, one line a time
    KEY/checkpoint.safetensors  from where it is resumed
    KEY/progress.json           where it stands, for whoever watches
    KEY/output.txt              what it printed and why it failed
    KEY/result.json             written last: a run with a result is finished

All but the lines of metrics.jsonl and output.txt are written atomically. A line that a kill cut off is dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.files import check_folder, read_bytes, write_atomically
from batchnorm.lab.runs.run import DIGITS, FORMAT, LabRun
from batchnorm.records import check_plain, parsed, plain, typed

VARIABLE = "BATCHNORM_LAB"  # names the store where --store does not
DEFAULT = "batchnorm-lab"
KEY = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
LEFT_BY_A_KILL = re.compile(r"\.[^/]*\.[0-9a-f]{16}")  # as `batchnorm.files.replacing` names its folders
MOST_THREADS = 4096
FINISHED, RUNNING, INTERRUPTED, FAILED, WAITING = "finished", "running", "interrupted", "failed", "waiting"


CHECKPOINT = "checkpoint.safetensors"
# In the order in which a run is deleted: a kill on the way leaves a run that is not finished.
FILES = (
    "result.json",
    "failure.json",
    "progress.json",
    "output.txt",
    "metrics.jsonl",
    CHECKPOINT,
    "environment.json",
    "run.json",
    "lock",
)


class Busy(BatchNormError):
    """Another process has this run open."""


@dataclass(frozen=True)
class Folder:
    """The folder of one run."""

    path: Path
    run: LabRun

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.path / "result.json").exists()

    @property
    def state(self) -> str:
        """Return finished, running, failed, interrupted or waiting."""
        if self.finished:
            return FINISHED
        try:
            if (self.path / "lock").exists():
                with self.opened():
                    pass
        except Busy:
            return RUNNING
        except BatchNormError:
            pass  # the folder of another user, which may not be written to
        if (self.path / "failure.json").exists():
            return FAILED
        return INTERRUPTED if (self.path / "environment.json").exists() else WAITING

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep every other process out; the system lets go of the lock of a process that dies."""
        lock = FileLock(self.path / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise Busy("another process is at this run", where=str(self.path), do="wait for it, or end it") from None
        except OSError as error:
            raise BatchNormError(f"{self.path} cannot be written to ({error.strerror})") from error
        try:
            yield
        finally:
            lock.release()

    def read(self, file: str) -> Any:
        """Return what a JSON file of the folder holds, None if there is none."""
        path = self.path / file
        if not path.exists():
            return None
        try:
            value = parsed(read_bytes(path))
            check_plain(value, file)
        except ValueError as error:
            raise damaged(path, str(error)) from error
        return value

    def write(self, file: str, value: Any) -> None:
        """Write a JSON file of the folder, atomically."""
        write_atomically(self.path / file, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")

    def result(self) -> dict[str, Any]:
        """Return the result of a finished run."""
        result = self.read("result.json")
        if not isinstance(result, dict):
            raise damaged(self.path / "result.json", "it holds no result")
        return result

    def failure(self) -> str:
        """Return why the run failed, nothing if it did not."""
        failure = self.read("failure.json")
        if failure is not None and not (isinstance(failure, dict) and isinstance(failure.get("error"), str)):
            raise damaged(self.path / "failure.json", "it holds no error")
        return str(failure["error"]) if failure else ""

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, each with its step; null is read as NaN."""
        path = self.path / "metrics.jsonl"
        lines = read_bytes(path).split(b"\n") if path.exists() else []
        found = []
        for number, line in enumerate(lines[:-1], start=1):  # the last one has no end: nothing, or cut off
            try:
                value = parsed(line)
                typed({"step": value["step"]}, {"step": int}, "the line")
                check_plain(value, "the line")
            except (ValueError, TypeError, KeyError) as error:
                raise damaged(path, f"line {number} cannot be read ({error})") from error
            found.append({key: math.nan if item is None else item for key, item in value.items()})
        return found

    def progress(self) -> Mapping[str, Any]:
        """Return where the run stands: done, total, note; empty if unknown."""
        try:
            found = self.read("progress.json")
            typed(found, {"done": int, "total": int, "note": str}, "it", ("done", "total"))
            return dict(found)
        except (BatchNormError, ValueError):
            return {}

    def attempts(self) -> list[dict[str, Any]]:
        """Return one entry for every time the run was started."""
        found = self.read("environment.json")
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise damaged(self.path / "environment.json", "it holds no list of starts")
        for each in found:
            threads, seconds = each.get("threads", 1), each.get("seconds", 0.0)
            if type(threads) is not int or not 1 <= threads <= MOST_THREADS or type(seconds) not in (int, float):
                raise damaged(self.path / "environment.json", "it holds no list of starts")
        return found

    def delete(self) -> list[str]:
        """Delete the run, and its folder unless something else is in it; return the names of what is left."""
        self.remove_leftovers()
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        left = sorted(place.name for place in self.path.iterdir())
        if not left:
            self.path.rmdir()
        return left

    def forget(self) -> None:
        """Remove all that came of the run, so that it can be carried out anew."""
        with self.opened():
            self.remove_leftovers()
            for name in FILES:
                if name not in ("run.json", "lock"):
                    (self.path / name).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove what a kill in the middle of a write left."""
        for place in self.path.iterdir():
            if LEFT_BY_A_KILL.fullmatch(place.name) and place.is_dir() and not place.is_symlink():
                shutil.rmtree(place, ignore_errors=True)


def damaged(path: Path, why: str) -> BatchNormError:
    """Return the error of a file that the store cannot read.

    >>> str(damaged(Path("runs/0f/result.json"), "it is empty"))
    'runs/0f/result.json is damaged (it is empty); move the run elsewhere, or delete its folder'
    """
    return BatchNormError(f"{path} is damaged ({why})", do="move the run elsewhere, or delete its folder")


def check_kinds(folder: Path) -> None:
    """Raise for links, pipes and devices in the place of a run's files: a run may come from another user.

    To write through a link would change a file that is not the run's, and a pipe would wait for ever.
    """
    if folder.is_symlink():
        raise BatchNormError(f"{folder} is a symbolic link, not the folder of a run; it is left alone")
    try:
        with os.scandir(folder) as entries:
            odd = [entry for entry in entries if entry.name in FILES and not entry.is_file(follow_symlinks=False)]
            names = [(entry.name, entry.is_symlink()) for entry in odd]
    except OSError as error:
        raise BatchNormError(f"{folder} cannot be read ({error.strerror})") from error
    for name, link in names:
        raise damaged(folder / name, "it is a symbolic link" if link else "it is not a regular file")


class Store:
    """A folder of runs.

    >>> Store("batchnorm-lab").folder(LabRun("train", {"seed": 0})).path.parent
    PosixPath('batchnorm-lab')
    """

    def __init__(self, root: str | os.PathLike[str] = "") -> None:
        """Use a folder; by default the one that BATCHNORM_LAB names, or ./batchnorm-lab."""
        self.root = Path(root or os.environ.get(VARIABLE, "") or DEFAULT)

    def folder(self, run: LabRun) -> Folder:
        """Return where a run is kept, whether it is there or not."""
        return Folder(self.root / run.key, run)

    def add(self, run: LabRun) -> Folder:
        """Make the folder of a run if it is not there; one that is there is left as it is."""
        folder = self.folder(run)
        if os.path.lexists(folder.path):
            check_kinds(folder.path)
        if (folder.path / "run.json").exists():
            return self.read(folder.path)
        check_folder("--store", self.root)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.remove_leftovers()
        others = [each.name for each in folder.path.iterdir() if each.name != "lock"]
        if others:
            raise damaged(folder.path / "run.json", f"it is missing beside {others[0]}")
        about = {"format": FORMAT, "experiment": run.experiment, "options": run.options, "name": run.name}
        folder.write("run.json", about | {"created": now()})
        return folder

    def read(self, path: Path) -> Folder:
        """Return the run of a folder, after a look at whether it is one."""
        check_kinds(path)
        about = Folder(path, LabRun("", {})).read("run.json")
        fields = {"format": int, "experiment": str, "options": dict, "name": str, "created": str}
        try:
            typed(about, fields, "run.json", fields)
        except ValueError as error:
            raise damaged(path / "run.json", str(error)) from error
        run = LabRun(about["experiment"], about["options"], about["name"])
        if about["format"] != FORMAT or run.key != path.name:
            raise damaged(path / "run.json", "its options are not those that the folder is named after")
        return Folder(path, run)

    def runs(self) -> tuple[list[Folder], list[str]]:
        """Return all runs, oldest first, and one sentence for each entry of the store that is not a run."""
        found, foreign = [], []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if path.name.startswith(".") or not (path.is_dir() or KEY.fullmatch(path.name)):
                continue
            try:
                if not KEY.fullmatch(path.name):
                    raise BatchNormError(f"{path} is not a run; it is left alone")
                check_kinds(path)
                if not any(path.glob("*.json")):
                    continue  # a kill came before it was written down what is to run
                found.append(self.read(path))
            except BatchNormError as error:
                foreign.append(str(error))
        return sorted(found, key=lambda folder: (folder.read("run.json")["created"], folder.path.name)), foreign

    def find(self, words: str) -> Folder:
        """Return the run whose key begins so, or that has this name.

        >>> Store("no-such-store").find("0f3")
        Traceback (most recent call last):
        batchnorm.errors.BatchNormError: no run in no-such-store is called '0f3'; see batchnorm lab list
        """
        runs, _ = self.runs()
        # A key comes before a name: a run from another user may be named after the key of another.
        found = (
            [folder for folder in runs if folder.path.name == words]
            or [folder for folder in runs if words and folder.path.name.startswith(words)]
            or [folder for folder in runs if folder.run.name == words]
        )
        if not found and KEY.fullmatch(words) and (self.root / words).is_dir():
            self.read(self.root / words)  # says what is wrong with it
        if not found:
            hint = did_you_mean(words, [folder.run.name for folder in runs], "see batchnorm lab list")
            raise BatchNormError(f"no run in {self.root} is called {words!r}", do=hint)
        if len(found) > 1:
            keys = ", ".join(folder.path.name for folder in found[:5])
            raise BatchNormError(f"{len(found)} runs are called {words!r}: {keys}", do="give more of the key")
        return found[0]


def now() -> str:
    """Return the time as ISO 8601, in UTC, to the microsecond, so that runs sort by it.

    >>> now().endswith("+00:00")
    True
    """
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
