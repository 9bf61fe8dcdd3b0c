"""What the commands of the lab share: refuse early, show progress, leave records, a picture and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.report.command import announce
from batchnorm.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.depth.run import Watch
    from batchnorm.lab.shelf import Shelf
    from batchnorm.records import RecordFile
    from batchnorm.report.sections import Section

PAGE = "report.html"


def check_outputs(threads: int, json: Path | None, svg: Path | None, out: Path | None) -> None:
    """Refuse a number of threads, or files that could not be written, before anything slow begins.

    >>> check_outputs(0, None, Path("figure.png"), None)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --svg is figure.png, but the picture is an SVG; name it figure.svg
    """
    if threads < 0:
        raise BatchNormError(f"--threads is {threads}", do="give a whole number, or 0 for torch's choice")
    if json is not None:
        check_target("--json", json)
    if svg is not None:
        if svg.suffix != ".svg":
            raise BatchNormError(f"--svg is {svg}, but the picture is an SVG", do=f"name it {svg.with_suffix('.svg')}")
        check_target("--svg", svg)
    if out is not None:
        check_folder("--out", out)


def earlier(
    out: Path | None, name: str, about: Mapping[str, Any], force: bool, *, resumed: bool = True
) -> tuple[RecordFile | None, Shelf | None]:
    """Return what a folder holds of the same experiment: its records if it is finished, and its finished parts.

    >>> earlier(None, "figure1", {"steps": 100}, force=False)
    (None, None)

    An experiment with other settings is refused: nothing is replaced without ``force``. ``resumed`` says whether one
    that was interrupted can go on.
    """
    if out is None:
        return None, None
    from batchnorm.lab.shelf import FILE, REPLACE, Shelf, check_same
    from batchnorm.records import read, values_of
    from batchnorm.report.figures import figures_of

    file = out / f"{name}.json"
    if force:
        (out / FILE).unlink(missing_ok=True)
    elif file.exists():
        records = read(file)
        with values_of(str(file), REPLACE):
            check_same(out, about_of(records), about)
            list(figures_of(records))  # refuses what was never measured
        if not resumed:
            raise BatchNormError(f"{out} holds this run", do="name another folder with --out, or add --force")
        if not records.summary.get("interrupted"):
            say(f"{out} holds this run: nothing was run again (--force does).")
            return records, None
    if not resumed:
        return None, None
    out.mkdir(parents=True, exist_ok=True)
    shelf = Shelf(out / FILE, about)
    if len(shelf):
        say(f"Going on with {out}: {len(shelf)} parts are done.", error=True)
    return None, shelf


def about_of(records: RecordFile) -> dict[str, Any]:
    """Return what an experiment was asked for: its command, its settings and its data.

    >>> from batchnorm.records import RecordFile
    >>> about_of(RecordFile("figure1", {"settings": {"steps": 100}, "threads": 2, "checksum": "0f"}, ()))
    {'command': 'figure1', 'steps': 100, 'data': '0f'}
    """
    given = records.configuration
    data = {"data": given["checksum"]} if "checksum" in given else {}
    return {"command": records.command, **(given.get("settings") or given.get("options") or {}), **data}


def watched(console: Console, steps: int, total: int) -> AbstractContextManager[Watch]:
    """Show progress on a terminal; elsewhere on stderr, so that the answer comes first in the output.

    >>> with watched(Console(), steps=100, total=800) as watch:  # doctest: +SKIP
    ...     run(Settings(steps=100), load(""), watch=watch)
    """
    from rich.console import Console

    from batchnorm.lab.depth.progress import watching

    seen = console if console.is_terminal else Console(stderr=True, highlight=False)
    return watching(seen, steps, total)


def leave(
    records: RecordFile,
    draw: Callable[[RecordFile], Section],
    *,
    json: Path | None,
    svg: Path | None,
    out: Path | None,
    open: bool,
    shelf: Shelf | None = None,
) -> None:
    """Write what was asked for: the records, the charts that ``draw`` makes as a picture, the records and the page.

    >>> leave(records, draw, json=Path("figure1.json"), svg=None, out=None, open=False)  # doctest: +SKIP
    Every curve is in figure1.json.
    """
    from batchnorm.report.load import Run
    from batchnorm.report.page import write_page
    from batchnorm.report.panels import write_picture
    from batchnorm.report.sections import Panels

    if json is not None:
        say(f"Every curve is in {records.write(json)}.")
    if not records.measurements:
        return
    section = draw(records)
    if svg is not None and isinstance(section, Panels):
        say(f"The picture is {write_picture(section, svg)}")
    if out is not None:
        records.write(out / f"{records.command}.json")
        announce(write_page([Run(records.command, records)], out / PAGE), open)
        if shelf is not None and not records.summary.get("interrupted"):
            shelf.clear()
