"""From what a user names to runs: record files, files of lines, findings of the doctor, and folders of these."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchnorm.errors import BatchNormError
from batchnorm.records import RecordFile, read

SUFFIXES = (".json", ".jsonl")


@dataclass(frozen=True)
class Run:
    """Records, and the name under which a page shows them."""

    name: str
    records: RecordFile


def load(paths: Iterable[Path]) -> list[Run]:
    """Read every run; of a folder, each file of records in it.

    >>> load([Path("no-such-run")])
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no no-such-run; name a file of records, or a folder of them
    """
    return [run for path in paths for run in (_folder(path) if path.is_dir() else [_file(path)])]


def _folder(path: Path) -> list[Run]:
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise BatchNormError(f"{path} has no file of records", do=f"name one that has some ({', '.join(SUFFIXES)})")
    return [_file(file) for file in files]


def _file(path: Path) -> Run:
    if not path.exists():
        raise BatchNormError(f"there is no {path}", do="name a file of records, or a folder of them")
    try:
        return Run(path.stem, read(path))
    except BatchNormError:
        findings = _findings(path)
        if findings is None:
            raise
        return Run(path.stem, findings)


def _findings(path: Path) -> RecordFile | None:
    """What the doctor found, as records; None if that is not what the file holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("findings"), list):
        return None
    return RecordFile("check", {}, (), content, machine={})
