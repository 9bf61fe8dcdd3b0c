"""How a report looks: tables on a terminal, tables in a notebook. Names are shown as they are, never read as markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from batchnorm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from batchnorm.records import Report


@dataclass(frozen=True)
class Listing:
    """A table before it is drawn: a title, the names of the columns, the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def listings(report: Report) -> list[Listing]:
    """Return the tables of a report: what changed, what was left alone.

    >>> from batchnorm.records import Change, Report
    >>> listings(Report((Change("bn1", "update", None, False),)))[0].rows
    (('bn1', 'update', 'None', 'False'),)
    """
    changed, left = len(report.paths), len(report.left)
    found = []
    if report.changes:
        rows = tuple((_path(c.path), c.what, str(c.before), str(c.after)) for c in report.changes)
        title = f"{changed} module{'s' * (changed != 1)} changed"
        found.append(Listing(title, ("module", "what", "before", "after"), _once(rows)))
    if report.left:
        rows_left = tuple((_path(path), reason) for path, reason in report.left.items())
        found.append(Listing(f"{left} left alone", ("module", "why"), rows_left))
    return found


def report_lines(report: Report) -> list[str]:
    """Return what is said below the tables: that nothing changed, and how far outputs and gradients are apart.

    >>> from batchnorm.records import Report
    >>> report_lines(Report())
    ['no module changed']
    """
    measured = [str(each) for each in (report.certificate, report.gradients) if each is not None]
    return measured if report.changes else ["no module changed", *measured]


def report_table(report: Report) -> RenderableType:
    """Draw a report for a terminal: what ``rich.print(report)`` prints.

    >>> import rich
    >>> from batchnorm.records import Change, Report
    >>> report = Report((Change("[red]", "class", "BatchNorm2d", "Identity"),))
    >>> rich.print(report_table(report))  # doctest: +NORMALIZE_WHITESPACE
    1 module changed
    module  what   before       after
    [red]   class  BatchNorm2d  Identity
    """
    from rich.console import Group
    from rich.text import Text

    lines = [Text(printable(line)) for line in report_lines(report)]
    return Group(*(draw(listing) for listing in listings(report)), *lines)


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


def report_html(report: Report) -> str:
    """Draw a report for a notebook, every name escaped.

    >>> from batchnorm.records import Change, Report
    >>> "<b>" in report_html(Report((Change("<b>", "class", "A", "B"),)))
    False
    """
    parts = []
    for listing in listings(report):
        head = "".join(f"<th>{escape(column)}</th>" for column in listing.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in listing.rows)
        caption = f"<caption>{escape(listing.title)}</caption>"
        parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    parts += [f"<p>{escape(line)}</p>" for line in report_lines(report)]
    return "\n".join(parts)


def plain_console(**options: Any) -> Console:
    """Return a console that reads no markup in what it is given, and is wide where nobody looks at it.

    >>> plain_console().print("[red]")
    [red]
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, **options)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=120, no_color=True, **options)
    return console


def _path(path: str) -> str:
    return path or "the model"


def _once(rows: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Rows in which a name that stands above is not said again."""
    return tuple(("", *row[1:]) if number and rows[number - 1][0] == row[0] else row for number, row in enumerate(rows))
