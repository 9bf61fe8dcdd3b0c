"""What the commands of the lab share: refuse early, show progress, leave records, a picture and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import CHECKPOINT, Store
from batchnorm.records import RecordFile, checked, plain, read, values_of
from batchnorm.report.command import announce
from batchnorm.terminal import note

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.heat import Watch
    from batchnorm.lab.runs.recorder import Recorder
    from batchnorm.report.sections import Section

PAGE, SIGNAL = "report.html", "signal.jsonl"
REPLACE = "name another folder with --out, or add --force to replace it"

Images = Annotated[
    str,
    typer.Option(
        envvar="BATCHNORM_DATA",
        help="A folder with MNIST's four idx files, or with a folder mnist. Without it, the bundled digits.",
        metavar="DIR",
    ),
]
BatchSize = Annotated[int, typer.Option(help="Examples per step; BN takes its statistics from these.")]
Rates = Annotated[str, typer.Option(help="The learning rates from which the best is chosen.", metavar="R,R,...")]
Json = Annotated[Path | None, typer.Option(help="Also write every curve and figure to this file.", metavar="OUT")]
Svg = Annotated[
    Path | None, typer.Option(help="Also write the charts as one picture, for a document.", metavar="FILE.svg")
]
Threads = Annotated[
    int, typer.Option(help="Train on so many threads; 0 takes as many as torch would. Changes no result.")
]
Out = Annotated[Path, typer.Option(help="The folder for the records and the page, report.html.", metavar="DIR")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write the records and the page.")]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]
Force = Annotated[
    bool, typer.Option("--force", help="Run again, and replace what is in the folder of --out, and other files.")
]


def check_outputs(threads: int, json: Path | None, svg: Path | None, out: Path | None, force: bool) -> None:
    """Raise for a number of threads, or files that could not be written, before anything slow begins.

    >>> check_outputs(0, None, Path("figure.png"), None, force=False)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --svg is figure.png, but the picture is an SVG; name it figure.svg
    """
    if threads < 0:
        raise BatchNormError(f"--threads is {threads}", do="give a whole number, or 0 for torch's choice")
    if json is not None:
        check_target("--json", json, force)
    if svg is not None:
        if svg.suffix != ".svg":
            raise BatchNormError(f"--svg is {svg}, but the picture is an SVG", do=f"name it {svg.with_suffix('.svg')}")
        check_target("--svg", svg, force)
    if out is not None:
        check_folder("--out", out)


def recorded(
    asked: LabRun,
    by: Callable[..., Mapping[str, Any]],
    *,
    threads: int,
    file: Path | None = None,
    keep: bool = True,
    force: bool = False,
    **more: Any,
) -> RecordFile:
    """Return the records of a run: those of the store if it is finished; else it is carried out, or goes on.

    >>> recorded(LabRun("race", asdict(DepthSettings())), race, threads=2, file=Path("race.json"))  # doctest: +SKIP

    ``by`` is called with the options, a recorder and what is given in ``more``. A ``file`` that another run left is
    refused: nothing is replaced without ``force``. Unless it is to ``keep`` the run, nothing stays.
    """
    from batchnorm.lab.runs.execute import execute
    from batchnorm.lab.runs.recorder import Stopped
    from batchnorm.lab.runs.records import asked_of, records_of
    from batchnorm.report.figures import figures_of

    if keep and file is not None and file.exists() and not force:
        kept = read(file)
        with values_of(str(file), REPLACE):
            check_same(file.parent, kept.configuration.get("asked", {}), asked_of(asked))
            list(figures_of(kept))  # refuses what was never measured
        if not kept.summary.get("interrupted"):
            note(f"{file.parent} holds this run: nothing was run again (--force does).")
            return kept
    with TemporaryDirectory() as nowhere:
        folder = Store("" if keep else nowhere).add(asked)
        if force:
            folder.forget()
        if folder.finished:
            note(f"{folder.path} holds this run: nothing was run again (--force does).")
            return records_of(folder)
        if (folder.path / CHECKPOINT).exists():
            note(f"Going on with {folder.path}.", error=True)
        results: list[Mapping[str, Any]] = []

        def observed(options: Mapping[str, Any], recorder: Recorder) -> Mapping[str, Any]:
            results.append(by(options, recorder, **more))
            if results[0]["records"]["summary"].get("interrupted"):
                raise Stopped
            return results[0]

        if not execute(folder, threads=threads, by=observed) and keep:
            note("Interrupted: the same command, or batchnorm lab resume, goes on.", error=True)
        return checked(plain(results[0]["records"]))


def check_same(out: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise for a folder that holds a run with other options.

    >>> check_same(Path("batchnorm-race"), {"steps": 800}, {"steps": 1500})
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: batchnorm-race holds a run with steps 800, not 1500; name another folder with \
--out, or add --force to replace it
    """
    from batchnorm.lab.runs.compare import short

    keys = [key for key in dict.fromkeys((*there, *asked)) if there.get(key) != asked.get(key)]
    if keys:
        words = ", ".join(f"{key} {short(there.get(key))}, not {short(asked.get(key))}" for key in keys[:3])
        raise BatchNormError(f"{out} holds a run with {words}", do=REPLACE)


def run_of(experiment: str, settings: Any, **more: Any) -> LabRun:
    """Return the run of a command, named after the settings that are not the defaults.

    >>> from batchnorm.lab.options import Options
    >>> run_of("race --network inception", Options(seeds=5)).name
    'race --network inception seeds=5'
    """
    usual = {field.name: field.default for field in fields(settings)}
    own = {key: value for key, value in asdict(settings).items() if value != usual[key]}
    words = [f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}" for key, value in own.items()]
    return LabRun(experiment, {**asdict(settings), **more}, " ".join([experiment, *words]))


def watched(console: Console, steps: int, total: int) -> AbstractContextManager[Watch]:
    """Show progress on a terminal; elsewhere on stderr, so that the answer comes first in the output.

    >>> with watched(Console(), steps=100, total=800) as watch:  # doctest: +SKIP
    ...     run(DepthSettings(steps=100), load(""), watch=watch)
    """
    from rich.console import Console

    from batchnorm.lab.progress import watching

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
) -> None:
    """Write what was asked for: the records, the charts that ``draw`` makes as a picture, the records and the page.

    >>> leave(records, draw, json=Path("figure1.json"), svg=None, out=None, open=False)  # doctest: +SKIP
    Every curve is in figure1.json.
    """
    from batchnorm.report.load import Run as Drawn
    from batchnorm.report.page import write_page
    from batchnorm.report.panels import write_picture
    from batchnorm.report.sections import Panels

    ended = out is None or not records.summary.get("interrupted")  # what goes on later writes these then
    if json is not None and ended:
        note(f"Every curve is in {records.write(json)}.")
    if not records.measurements:
        return
    section = draw(records)
    if ended and svg is not None and isinstance(section, Panels):
        note(f"The picture is {write_picture(section, svg)}")
    if out is not None:
        records.write(out / f"{records.command}.json")
        announce(write_page([Drawn(records.command, records)], out / PAGE), open)
