"""Base of the probes' results: picture and numbers, on a terminal, in a notebook and on a page."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import webbrowser
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from batchnorm.records import Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import write_page
from batchnorm.report.panels import picture, write_picture
from batchnorm.report.sections import Panels, Table
from batchnorm.report.stored import to_plain
from batchnorm.terminal import say

COMMAND = "probe"


class ProbeResult:
    """Base of the results of probes. A subclass defines its picture and its records."""

    def picture(self) -> Panels:
        """Return the figure: its title is the finding, its table the numbers."""
        raise NotImplementedError

    def measurements(self, **setting: Any) -> tuple[Measurement, ...]:
        """Return the figures as records, with ``setting`` to tell them from others."""
        raise NotImplementedError

    def records(self, **setting: Any) -> RecordFile:
        """Return records with the figure in them, which ``batchnorm report`` draws; results that differ share axes.

        >>> found.records(norm="batch").write("batch.json")  # doctest: +SKIP
        PosixPath('batch.json')
        """
        return RecordFile(COMMAND, setting, self.measurements(**setting), {"figure": to_plain(self.picture())})

    def show(self, path: str | os.PathLike[str] | None = None) -> None:
        """Draw the result: in a notebook in its cell; elsewhere print the numbers and open a page with the picture.

        >>> found.show("landscape.svg")  # doctest: +SKIP

        ``path`` keeps the page, or with the ending .svg the picture; without it, the page is a temporary file.
        """
        if path is None and in_notebook():
            import_module("IPython.display").display(self)
            return
        say_lines(str(self))
        if path is None:
            file, path = tempfile.mkstemp(".html", f"batchnorm-{COMMAND}-")
            os.close(file)
        written = Path(path)
        if written.suffix == ".svg":
            write_picture(self.picture(), written)
        else:
            write_page([Run(COMMAND, self.records())], written)
        say(f"The picture is {written}")
        webbrowser.open(written.absolute().as_uri())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.picture().title}>"

    def __str__(self) -> str:
        """Return the finding and the numbers with three digits, one row a line."""
        drawn = self.picture()
        return "\n".join([drawn.title, *(aligned(drawn.table) if drawn.table else ())])

    def _repr_html_(self) -> str:
        """Let a notebook draw it: an image, so that nothing in a name is read as markup or script."""
        drawn = self.picture()
        image = base64.b64encode(picture(drawn).encode()).decode()
        return (
            f'<img alt="{escape(drawn.title)}" style="max-width:100%;width:60rem" '
            f'src="data:image/svg+xml;base64,{image}">'
            f"<details><summary>As numbers</summary><pre>{escape(str(self))}</pre></details>"
        )


def aligned(table: Table) -> list[str]:
    """Write a table as lines of text.

    >>> aligned(Table("", "", ("layer", "shift"), (("conv1", "0.1"), ("fc", "12")), numbers=(1,)))
    ['layer  shift', 'conv1    0.1', 'fc        12']
    """
    rows = [table.columns, *table.rows]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(size) if number in table.numbers else cell.ljust(size)
            for number, (cell, size) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]


def say_lines(text: str) -> None:
    """Print lines, with names in them escaped."""
    for line in text.splitlines():
        say(line)


def in_notebook() -> bool:
    """Whether the code runs in a notebook.

    >>> in_notebook()
    False
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
