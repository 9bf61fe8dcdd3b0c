"""Sections as plain data and back, so that a file of records can hold what is drawn of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from batchnorm.records import plain
from batchnorm.report import sections
from batchnorm.report.palette import NAMES
from batchnorm.report.sections import Headline, Line, Panels, Plot, Section, Table

STORED = {kind.kind: kind for kind in (Table, Plot, Panels, Headline)}


def to_plain(section: Section) -> dict[str, Any]:
    """Return a section as dictionaries, lists and plain values, with its kind.

    >>> to_plain(Headline("8 times", "Fewer steps."))["kind"]
    'headline'
    """
    if section.kind not in STORED:
        raise TypeError(f"a {section.kind} cannot be kept in records")
    return {"kind": section.kind, **plain(dataclasses.asdict(section))}


def from_plain(fields: Any) -> Section:
    """Return the section of which `to_plain` made this; raise ``ValueError`` if a field has another type.

    >>> from_plain(to_plain(Headline("8 times", "Fewer steps.")))
    Headline(title='8 times', sentence='Fewer steps.', cards=(), notes=(), bars=())
    >>> from_plain({"kind": "headline", "title": 8})
    Traceback (most recent call last):
    ValueError: title is 8, not a str
    """
    kind = fields.get("kind") if isinstance(fields, Mapping) else None
    if kind not in STORED:
        raise ValueError(f"a section is {kind!r:.40}, not one of {', '.join(STORED)}")
    return cast("Section", _made({key: value for key, value in fields.items() if key != "kind"}, STORED[kind], kind))


def checked_section(section: Section) -> Section:
    """Return the section; raise ``ValueError`` if a field that was drawn from records has another type.

    >>> checked_section(Headline("8 times", 3))
    Traceback (most recent call last):
    ValueError: sentence is 3, not a str
    """
    if type(section) in STORED.values():
        _dataclass(section, type(section), section.kind)
    return section


def _made(value: Any, kind: Any, name: str) -> Any:
    """Return the value that a field of this type had before it was stored."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = (each for each in inner if each is not NoneType)
        return _made(value, kind, name)
    if dataclasses.is_dataclass(kind):
        return _dataclass(value, kind, name)
    if origin is Mapping:
        if isinstance(value, Mapping):
            return {str(key): _made(item, inner[1], name) for key, item in value.items()}
    elif origin in (tuple, Sequence):
        if isinstance(value, (list, tuple)):
            fixed = origin is tuple and inner[-1] is not Ellipsis
            if fixed and len(value) != len(inner):
                raise ValueError(f"{name} has {len(value)} values, not {len(inner)}")
            kinds = inner if fixed else [inner[0]] * len(value)
            return tuple(_made(item, own, name) for item, own in zip(value, kinds, strict=True))
    elif kind is float:
        if value is None:  # what NaN and infinity become in a file
            return math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        if name == "colour" and value not in NAMES:
            raise ValueError(f"colour is {value!r:.40}, not one of {', '.join(NAMES)}")
        return value
    raise ValueError(f"{name} is {value!r:.40}, not a {getattr(kind, '__name__', kind)}")


def _dataclass(value: Any, kind: Any, name: str) -> Any:
    if isinstance(value, kind):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r:.40}, not a {kind.__name__}")
    types = {field.name: _types(kind)[field.name] for field in dataclasses.fields(kind)}
    unknown = [key for key in value if key not in types]
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r:.40}, which is unknown")
    made = {key: _made(item, types[key], key) for key, item in value.items()}
    try:
        found = kind(**made)
    except TypeError as error:
        raise ValueError(f"{name} is not whole ({error})") from None
    if isinstance(found, Line):
        check_even(found)
    return found


def check_even(line: Line) -> None:
    """Raise ``ValueError`` if a line has not a value at each of its places, or none.

    >>> check_even(Line("accuracy", (1, 2, 3), (0.5,), "blue"))
    Traceback (most recent call last):
    ValueError: the line 'accuracy' has 1 y for 3 x
    """
    for name in ("y", "low", "high"):
        count = len(getattr(line, name))
        if count not in (0, len(line.x)) or len(line.low) != len(line.high):
            raise ValueError(f"the line {line.name!r:.40} has {count} {name} for {len(line.x)} x")


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, vars(sections))
