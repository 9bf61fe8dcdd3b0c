"""``batchnorm report``: records in, one page out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from batchnorm.files import check_target
from batchnorm.options import Force
from batchnorm.terminal import note


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Files that batchnorm wrote: --json of race, bench, calibrate and fold, what check --format json "
            "printed, what watch recorded (.jsonl), or a folder of these.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Write the page here; in a folder, it is named report.html.")
    ] = "report.html",
    open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    force: Force = False,
) -> None:
    """Draw records as one HTML page that works from disk, without a network.

    A race becomes the paper's Figures 2 and 3 with your numbers, what watch recorded
    a film of every layer and a map of every layer, findings, benchmarks and what a verb
    changed tables. Several runs come one below the other.

    Examples:

      batchnorm report batchnorm-race --out race.html

      batchnorm check net.py:make --example 8,3,32,32 --format json > findings.json

      batchnorm report run.jsonl findings.json --open
    """
    page = page_named(out)
    check_target("--out", page, force)
    from batchnorm.report.load import load
    from batchnorm.report.page import write_page

    written = write_page(load(runs), page)
    announce(written, open)


def page_named(out: str) -> Path:
    """Where a page goes: the file that is named, or report.html in the folder that is (or is to be, with a slash).

    >>> page_named("race.html").name, page_named("/").name, page_named("pages-to-be/").as_posix()
    ('race.html', 'report.html', 'pages-to-be/report.html')
    """
    slash = out.endswith(tuple(filter(None, (os.sep, os.altsep, "/"))))
    return Path(out) / "report.html" if slash or Path(out).is_dir() else Path(out)


def announce(page: Path, open: bool) -> None:
    """Say where the page is, and open it if asked to.

    >>> announce(Path("report.html"), open=False)
    The page is report.html
    """
    note(f"The page is {page}")
    if open:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())
