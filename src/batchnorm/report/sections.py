"""What a page is made of, before it is drawn: plots, tables, the player, a headline. Plain data, no markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
class Choice:
    """One of several things that a plot can show: its name, and the changes to traces and layout that show it."""

    name: str
    figure: Mapping[str, Any]


@dataclass(frozen=True)
class Plot:
    """A plotly figure as plain data, what it shows in words, and the same numbers as a table.

    A trace gets its colour from ``meta.colour``, a name of the palette, so that it can differ in dark mode. A line has
    its name at its end, and its band, the trace before it, while the pointer is on it.
    """

    kind: ClassVar[str] = "plot"
    title: str
    sentence: str
    label: str
    figure: Mapping[str, Any]
    height: int = 420
    choices: tuple[Choice, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of a small chart, an area between ``low`` and ``high``, or both; its name is written at its end.

    ``named_at`` is another place for the name: a share of the points; there it stands above the line or area, or with a
    ``nudge`` above 0 below it. ``nudge`` moves the name down. With the dash "points" each value is a dot as wide as the
    line.
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
    """One small chart; ``frames`` are further lines that are shown in turn, so that the chart moves.

    ``x_names`` and ``y_names`` name the whole numbers along an axis, y from the top down. ``cells`` are rows of a map,
    drawn in ``colour``: the larger the darker.
    """

    title: str
    lines: tuple[Line, ...]
    x_title: str = ""
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    percent: bool = False
    frames: tuple[tuple[Line, ...], ...] = ()
    x_names: tuple[str, ...] = ()
    y_names: tuple[str, ...] = ()
    cells: tuple[tuple[float, ...], ...] = ()
    colour: str = "blue"

    @property
    def all_lines(self) -> tuple[Line, ...]:
        """Return the lines that stand still and those of every frame."""
        return (*self.lines, *(line for frame in self.frames for line in frame))


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


@dataclass(frozen=True)
class Interval:
    """A quantity with its interval, beside the threshold on whose side it was claimed to lie."""

    name: str
    value: float
    low: float
    high: float
    threshold: float
    above: bool  # whether the claimed side is above the threshold
    text: str  # the value and its interval
    claimed: str  # the side and the threshold
    outcome: str


@dataclass(frozen=True)
class Entry:
    """A row of a ledger that opens: what was judged, how, the figures, the pictures, the card."""

    name: str
    title: str
    outcome: str
    sentence: str
    source: str
    links: tuple[tuple[str, str], ...]  # a text, and the address it leads to or nothing
    reported: str  # the figure of the source
    shown: Interval | None  # in the row; ``intervals`` has all
    intervals: tuple[Interval, ...]
    amounts: tuple[str, ...]
    command: str
    sections: tuple[Table | Plot | Panels | Headline, ...]
    card: tuple[tuple[str, str], ...]
    remark: tuple[str, str] | None = None  # a heading, and what must not be missed


@dataclass(frozen=True)
class Ledger:
    """Rows with an outcome each, in groups with a heading each; the outcomes are counted in a bar that filters."""

    kind: ClassVar[str] = "ledger"
    title: str
    sentence: str
    groups: tuple[tuple[str, tuple[Entry, ...]], ...]
    looks: Mapping[str, str]  # of every outcome: good, bad, open or none
    unit: str = "rows"
    notes: tuple[str, ...] = ()

    def counted(self) -> list[tuple[str, int]]:
        """Return every outcome that there is, and how many rows have it.

        >>> Ledger("", "", (), {"confirmed": "good"}).counted()
        []
        """
        found = [entry.outcome for _, entries in self.groups for entry in entries]
        return [(outcome, found.count(outcome)) for outcome in self.looks if outcome in found]


Section = Table | Plot | Panels | Player | Headline | Ledger


def all_within(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield every section, those inside of others included.

    >>> [section.title for section in all_within([Headline("one", ""), Ledger("two", "", (), {})])]
    ['one', 'two']
    """
    for section in sections:
        yield section
        if isinstance(section, Ledger):
            yield from (inner for _, entries in section.groups for entry in entries for inner in entry.sections)


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
