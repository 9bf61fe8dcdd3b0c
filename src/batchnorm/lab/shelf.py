"""What is done of a long experiment, kept beside its records, so that the same command goes on after a kill."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.files import read_bytes, write_atomically
from batchnorm.lab.runs.compare import short
from batchnorm.records import parsed, plain

FILE = "parts.jsonl"
REPLACE = "name another folder with --out, or add --force to replace it"


class Shelf:
    """Finished parts of one experiment by key, one line of JSON each; a last line that a kill cut off is dropped.

    >>> shelf = Shelf(folder / FILE, {"steps": 1500})  # doctest: +SKIP
    >>> shelf.put("10 blocks, BN x5, seed 3", {"accuracy": [0.1, 0.9]})  # doctest: +SKIP
    >>> shelf.get("10 blocks, BN x5, seed 3")  # doctest: +SKIP
    {'accuracy': [0.1, 0.9]}
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Open the file; one that was written for other settings is refused."""
        self.path, self._lock = path, threading.Lock()
        self._parts: dict[str, Any] = {}
        lines = read_bytes(path).split(b"\n")[:-1] if path.exists() else []
        try:
            for number, line in enumerate(lines):
                fields = parsed(line)
                if number == 0:
                    check_same(path.parent, fields["about"], about)
                else:
                    self._parts[fields["key"]] = fields["value"]
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, BatchNormError):
                raise
            raise BatchNormError(f"{path} is damaged ({error})", do="delete it, or name another folder") from error
        # Whole lines only: the next one must not be put behind half of one.
        entries = [{"about": about}, *({"key": key, "value": value} for key, value in self._parts.items())]
        write_atomically(path, "".join(json.dumps(plain(each), allow_nan=False) + "\n" for each in entries))

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: str) -> Any:
        """Return what was put here under a key, None if nothing was."""
        return self._parts.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a finished part."""
        text = json.dumps(plain({"key": key, "value": value}), allow_nan=False) + "\n"
        with self._lock, open(self.path, "a", encoding="utf-8") as stream:
            stream.write(text)

    def clear(self) -> None:
        """Remove the file: the records have everything now."""
        self.path.unlink(missing_ok=True)


def check_same(folder: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse a folder that holds an experiment with other settings.

    >>> check_same(Path("batchnorm-race"), {"steps": 800}, {"steps": 1500})
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: batchnorm-race holds a run with steps 800, not 1500; name another folder with \
--out, or add --force to replace it
    """
    there, asked = plain(there), plain(asked)
    keys = [key for key in dict.fromkeys((*there, *asked)) if there.get(key) != asked.get(key)]
    if keys:
        words = ", ".join(f"{key} {short(there.get(key))}, not {short(asked.get(key))}" for key in keys[:3])
        raise BatchNormError(f"{folder} holds a run with {words}", do=REPLACE)
