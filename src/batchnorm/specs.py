"""Code that a user names: ``file.py:factory`` or ``package.module:factory``, and what it gives."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from batchnorm import interrupts
from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.files import check_regular

LONGEST = 400  # characters quoted of a library's error; exporters write pages


def made_by(spec: str, ready: type | tuple[type, ...] = ()) -> Any:
    """Return what a spec names, called without arguments if it is not ``ready`` as it is.

    >>> made_by("collections:OrderedDict")
    OrderedDict()
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise BatchNormError(
            f"{spec!r} does not say what to take from where", do="write file.py:factory or package.module:factory"
        )
    factory: Any = _module(place)
    for part in name.split("."):
        if not hasattr(factory, part):
            names = [n for n, v in vars(factory).items() if callable(v) and not n.startswith("_")]
            own = [n for n in names if getattr(vars(factory)[n], "__module__", "") == factory.__name__]
            hint = ", ".join((own or names)[:8]) if isinstance(factory, ModuleType) else ""
            near = did_you_mean(part, own or names, f"it has {hint}") if hint else ""
            raise BatchNormError(f"{place} has no {name!r}", do=near)
        factory = getattr(factory, part)
    if isinstance(factory, ready):
        return factory
    if not callable(factory):
        return factory
    _check_callable(spec, factory)
    return called(f"{spec}()", factory)


def _check_callable(spec: str, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some classes of C do not say
        return
    try:
        signature.bind()
    except TypeError:
        empty = inspect.Parameter.empty
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in signature.parameters.values() if p.default is empty and p.kind not in variadic]
        raise BatchNormError(
            f"{spec} needs arguments ({', '.join(needed)}), and is called without",
            do="write a function in a file that calls it with them, and name that",
        ) from None


def called(what: str, function: Callable[[], Any]) -> Any:
    """Return the result of the user's code, whose errors become one sentence (a script may leave by SystemExit, too).

    >>> called("counting", lambda: 1 / 0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: counting raises ZeroDivisionError: division by zero
    """
    interrupts.check()
    try:
        return function()
    except BatchNormError:
        raise
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        short = words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."
        raise BatchNormError(f"{what} raises {type(error).__name__}: {short}") from error


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place))
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides nothing that is installed
    importlib.invalidate_caches()
    try:
        return called(f"importing {place}", lambda: importlib.import_module(place))  # type: ignore[no-any-return]
    except BatchNormError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError) and f"{place}.".startswith(f"{cause.name}.")
        if missing or place.startswith("."):
            raise BatchNormError(
                f"there is no module {place!r}", do="write file.py:factory or package.module:factory"
            ) from None
        raise


def _from_file(file: Path) -> ModuleType:
    """Run a file as a module, with its folder importable, as Python does with a script."""
    if not file.is_file():
        if file.exists():
            check_regular(file)
        raise BatchNormError(f"there is no file {file}", do="write file.py:factory or package.module:factory")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name, number = file.stem, 1
    while name in sys.modules:  # of another file, or of an earlier state of this one
        name, number = f"{file.stem}_{number}", number + 1
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        called(f"running {file}", lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
