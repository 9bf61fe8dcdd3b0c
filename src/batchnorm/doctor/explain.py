"""The commands ``batchnorm explain`` and ``batchnorm rules``; torch is imported only when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.doctor.config import one_of
from batchnorm.present import plain_console

if TYPE_CHECKING:
    from rich.console import Console


def explain(
    rule: Annotated[str, typer.Argument(help="A code such as BN201, or a name such as stale-statistics.")],
) -> None:
    """Explain a rule: what it finds, why that is bad, what to do instead, and where people met it.

    Examples:

      batchnorm explain BN201

      batchnorm explain bias-before-norm
    """
    from rich.console import Console

    from batchnorm.doctor.catalogue import rule_named
    from batchnorm.doctor.pages import page_of

    show_page(page_of(rule_named(rule)), Console())


def show_page(page: str, console: Console) -> None:
    """Show a page of Markdown: drawn on a terminal, as it is in a pipe.

    >>> from rich.console import Console
    >>> show_page("# BN101", Console())
    # BN101
    """
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page))
    else:
        print(page.rstrip())


def rules(
    format: Annotated[str, typer.Option("--output-format", "--format", help="text or json.")] = "text",
) -> None:
    """List the rules: code, name, severity, what each looks at, and whether it can be repaired automatically.

    Rules that look at `tensors` work on a bare checkpoint; those of a `run`
    need bn.monitor around the training loop.
    """
    import json

    from rich.table import Table
    from rich.text import Text

    from batchnorm.doctor.catalogue import described, linked
    from batchnorm.doctor.pages import short_needs

    one_of(format, ("text", "json"), "--output-format")
    columns = ("code", "name", "severity", "needs", "fix")
    rows = [
        dict(zip(columns, (rule.code, rule.name, rule.severity, short_needs(rule), rule.safety), strict=True))
        for rule in described().values()
    ]
    if format == "json":
        titled = [{**row, "title": described()[row["code"]].title} for row in rows]
        typer.echo(json.dumps(titled, indent=1))
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        code, *rest = (row[column] for column in columns)
        table.add_row(Text(code, style=linked(code)), *rest)
    plain_console().print(table)
