"""The settings of a project's checks: ``[tool.batchnorm]`` in its pyproject.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.files import read_bytes
from batchnorm.records import SEVERITIES

FORMATS = ("text", "json", "sarif", "github")
FAIL_ON = (*SEVERITIES, "never")
KEYS = ("select", "ignore", "fail-on", "format", "per-module-ignores")


@dataclass(frozen=True)
class Settings:
    """The selected rules, the severity that fails, and the output format.

    >>> Settings().fail_on
    'warning'

    ``note`` is a remark to print for the user.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "warning"
    format: str = "text"
    per_module_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""


def find_settings(start: Path | None = None) -> Settings:
    """Read the nearest pyproject.toml with a ``[tool.batchnorm]``, from a folder upwards.

    >>> find_settings(Path("/")).format
    'text'
    """
    start = (start or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            settings = read_settings(file)
            if settings is not None:
                return settings
    return Settings()


def read_settings(file: Path) -> Settings | None:
    """Read the ``[tool.batchnorm]`` of one file; None if it has none.

    >>> read_settings(Path("no-such.toml"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such.toml cannot be read (No such file or directory)
    """
    try:
        text = read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BatchNormError(f"{file} cannot be read ({error})") from error
    if "batchnorm" not in text:  # most files; do not complain about a file that is not for us
        return None
    parser = _parser()
    if parser is None:
        if re.search(r"^\s*\[\s*tool\s*\.\s*batchnorm\b", text, re.MULTILINE) is None:
            return None
        return Settings(note=f"{file} has [tool.batchnorm], which is read from Python 3.11 on, or where tomli is")
    try:
        content = parser.loads(text)
    except (ValueError, RecursionError) as error:  # both parsers' errors are ValueErrors
        raise BatchNormError(f"{file} is not TOML: {error}") from error
    tool = content.get("tool")
    table = tool.get("batchnorm") if isinstance(tool, dict) else None
    return None if table is None else _settings(table, file)


def _parser() -> Any:
    """Python's own parser of TOML (from 3.11 on), or the one it came from, if it is there."""
    for name in ("tomllib", "tomli"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def _settings(table: Any, file: Path) -> Settings:
    where = f"{file}, [tool.batchnorm]"
    if not isinstance(table, dict):
        raise BatchNormError("this is not a table", where=where, do="write [tool.batchnorm] and keys below it")
    for key in table:
        if key not in KEYS:
            hint = did_you_mean(key.replace("_", "-"), KEYS, f"the keys are {', '.join(KEYS)}")
            raise BatchNormError(f"there is no key {key!r}", where=where, do=hint)
    per_module = table.get("per-module-ignores", {})
    if not isinstance(per_module, dict):
        raise BatchNormError(
            "per-module-ignores is not a table", where=where, do='write "backbone.*" = ["BN101"] below it'
        )
    return Settings(
        _words(table, "select", where),
        _words(table, "ignore", where),
        one_of(table.get("fail-on", "warning"), FAIL_ON, "fail-on", where),
        one_of(table.get("format", "text"), FORMATS, "format", where),
        {pattern: _words(per_module, pattern, f"{where}, per-module-ignores") for pattern in per_module},
    )


def _words(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    given = table.get(key, [])
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise BatchNormError(f"{key} is {given!r}", where=where, do='write a list of rules, such as ["BN101", "BN2"]')
    check_rules(given, f"{where}, {key}")
    return tuple(given)


def check_rules(words: list[str] | tuple[str, ...], where: str) -> None:
    """Raise if a word names no rule, with the place where it was written.

    >>> check_rules(["BN999"], "--select")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --select: there is no rule 'BN999'; did you mean BN209 vanished-variance or \
BN109 low-precision-statistics?
    """
    from batchnorm.doctor.codes import chosen

    try:
        chosen(words)
    except BatchNormError as error:
        raise BatchNormError(error.problem, where=where, do=error.do) from None


def one_of(given: Any, known: tuple[str, ...], what: str, where: str = "") -> str:
    """Return the word if it is one of those known; else raise an error that lists them.

    >>> one_of("warnings", FAIL_ON, "--fail-on")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --fail-on is 'warnings'; give one of error, warning, advice, never
    """
    if given not in known:
        raise BatchNormError(f"{what} is {given!r}", where=where, do=f"give one of {', '.join(known)}")
    return str(given)
