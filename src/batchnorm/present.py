"""How a report looks: tables on a terminal, tables in a notebook. Names are shown as they are, never read as markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from batchnorm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True)
class Listing:
    """A table before it is drawn: a title, the names of the columns, the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def draw(listing: Listing, numbers: Sequence[str] = (), whole: Sequence[str] = ()) -> RenderableType:
    """Draw one table; the columns named in ``numbers`` stand to the right, those in ``whole`` are not folded.

    >>> import rich
    >>> listing = Listing("Layers", ("layer", "move"), (("a", "1.5"),))
    >>> rich.print(draw(listing, numbers=["move"]))  # doctest: +NORMALIZE_WHITESPACE
    Layers
    layer  move
    a       1.5
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=Text(printable(listing.title), "bold"))
    table.title_justify = "left"
    for column in listing.columns:
        table.add_column(
            Text(printable(column), "dim"),
            overflow="fold",
            justify="right" if column in numbers else "left",
            no_wrap=column in whole,
        )
    for row in listing.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


class Tabled:
    """What a terminal and a notebook show as tables, with lines below them.

    >>> from rich import print
    >>> class Colours(Tabled):
    ...     def tables(self):
    ...         return [Listing("Hues", ("name",), (("[red]",),))]
    >>> print(Colours())  # doctest: +NORMALIZE_WHITESPACE
    Hues
    name
    [red]
    """

    def tables(self) -> list[Listing]:
        """The tables, in order."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """The lines below the tables."""
        return []

    def __rich__(self) -> RenderableType:
        """Let ``rich.print`` draw the tables."""
        from rich.console import Group
        from rich.text import Text

        return Group(*map(draw, self.tables()), *(Text(printable(line)) for line in self.lines()))

    def _repr_html_(self) -> str:
        """Let a notebook draw the tables, every name escaped."""
        parts = []
        for listing in self.tables():
            head = "".join(f"<th>{escape(column)}</th>" for column in listing.columns)
            rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in listing.rows)
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            caption = f"<caption>{escape(listing.title)}</caption>"
            parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        parts += [f"<p>{escape(line)}</p>" for line in self.lines()]
        return "\n".join(parts)


def plain_console(**options: Any) -> Console:
    """Return a console that reads no markup in what it is given, and is 120 columns wide if it is not a terminal.

    >>> plain_console().print("[red]")
    [red]
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, **options)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=120, no_color=True, **options)
    return console
