"""From what a user names to runs: record files, files of lines, findings of the doctor, and folders of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchnorm.errors import BatchNormError
from batchnorm.files import read_bytes
from batchnorm.records import RecordFile, check_plain, parsed, read, typed

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
        content = parsed(read_bytes(path))
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("findings"), list):
        return None
    try:
        check_plain(content, "the file")
        for number, finding in enumerate(content["findings"], start=1):
            typed(finding, _FINDING, f"finding {number}", ("code", "name", "severity", "path", "sentence"))
        for key in ("skipped", "failed"):
            typed(content.get(key, {}), dict.fromkeys(content.get(key, {}), str), key)
    except (TypeError, ValueError) as error:
        raise BatchNormError(f"these are not the findings of check ({error})", where=str(path)) from error
    return RecordFile("check", {}, (), content, machine={})


_FINDING: dict[str, type] = {
    **dict.fromkeys(("code", "name", "severity", "path", "sentence", "repair", "fix"), str), "numbers": dict,
    "step": object,
}  # fmt: skip
