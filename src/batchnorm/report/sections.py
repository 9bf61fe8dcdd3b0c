"""What a page is made of, before it is drawn: plots, tables, the player, a headline. Plain data, no markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Table:
    """Rows of words; the columns numbered in ``numbers`` stand to the right, rows in ``muted`` are not ours.

    >>> Table("Steps", "How soon.", ("variant", "steps"), (("BN-x5", "180"),)).kind
    'table'
    """

    kind: ClassVar[str] = "table"
    title: str
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    muted: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    badges: Mapping[str, str] = field(default_factory=dict)  # a cell with this text is drawn as a badge of this kind


@dataclass(frozen=True)
class Switch:
    """A box to tick: which traces of a plot it shows and hides, under which name, colour and dash."""

    name: str
    traces: tuple[int, ...]
    colour: str
    dash: str = "solid"


@dataclass(frozen=True)
class Choice:
    """One of several things that a plot can show: its name, and the changes to traces and layout that show it."""

    name: str
    figure: Mapping[str, Any]


@dataclass(frozen=True)
class Plot:
    """A plotly figure as plain data, what it shows in words, and the same numbers as a table.

    A trace gets its colour from ``meta.colour``, a name of the palette, so that it can differ in dark mode.
    """

    kind: ClassVar[str] = "plot"
    title: str
    sentence: str
    label: str
    figure: Mapping[str, Any]
    height: int = 420
    switches: tuple[Switch, ...] = ()
    choices: tuple[Choice, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of a small chart, an area between ``low`` and ``high``, or both; its name is written at its end.

    ``named_at`` is another place for the name: a share of the points; there it stands above the line or area, or with a
    ``nudge`` above 0 below it. ``nudge`` moves the name down.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    dash: str = "solid"
    width: float = 2.0
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    opacity: float = 0.22
    nudge: float = 0.0
    named_at: float = 1.0


@dataclass(frozen=True)
class Panel:
    """One small chart."""

    title: str
    lines: tuple[Line, ...]
    x_title: str = ""
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    percent: bool = False


@dataclass(frozen=True)
class Panels:
    """Small charts side by side, what they show in words, and the same numbers as a table."""

    kind: ClassVar[str] = "panels"
    title: str
    sentence: str
    panels: tuple[Panel, ...]
    columns: int = 3
    height: int = 250
    table: Table | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Player:
    """The moving picture of the signal: its data, and what to say about how it was made."""

    kind: ClassVar[str] = "player"
    title: str
    sentence: str
    data: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """One figure in large print: the figure, what it is, and a line below."""

    value: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a headline: its name, its length in any unit, what is written at its end, its color, a remark."""

    name: str
    length: float
    text: str
    colour: str
    remark: str = ""


@dataclass(frozen=True)
class Headline:
    """What a run came to, first thing on the page."""

    kind: ClassVar[str] = "headline"
    title: str
    sentence: str
    cards: tuple[Card, ...] = ()
    notes: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()


Section = Table | Plot | Panels | Player | Headline


def short(value: float | None, digits: int = 3) -> str:
    """Write a number for a table.

    >>> short(0.123456), short(1234567), short(float("nan")), short(None), short(float("inf")), short(-2.0)
    ('0.123', '1.23e+06', '–', '–', '∞', '−2')
    """
    if value is None or value != value:
        return "–"
    if value in (float("inf"), -float("inf")):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}".replace("-", "−", 1) if value < 0 else f"{value:.{digits}g}"


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Leave out values evenly until there are at most so many; the first and the last stay.

    >>> thinned(range(9), most=4)
    [0, 3, 6, 8]
    >>> thinned(range(3), most=4)
    [0, 1, 2]
    """
    if len(values) <= most:
        return list(values)
    stride = -(-(len(values) - 1) // max(most - 1, 1))
    kept = list(values[::stride])
    return kept if (len(values) - 1) % stride == 0 else [*kept, values[-1]]
