"""``batchnorm race``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm import interrupts
from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.lab.options import INITS, RATES, Options, parse_rates
from batchnorm.report.command import announce
from batchnorm.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.summary import Result
    from batchnorm.records import RecordFile

DEFAULTS = Options()
FOLDER, PAGE, SIGNAL = Path("batchnorm-race"), "report.html", "signal.jsonl"


def race(
    init: Annotated[
        str,
        typer.Option(help=f"How weights begin: {', '.join(INITS)}. A weaker start shows more of what BN buys."),
    ] = DEFAULTS.init,
    seeds: Annotated[
        int,
        typer.Option(help="Networks per variant and learning rate; 3 can just give a verdict, more give a firmer one."),
    ] = DEFAULTS.seeds,
    steps: Annotated[
        int,
        typer.Option(help="Training steps of every network; a longer race gives the baseline a higher best."),
    ] = DEFAULTS.steps,
    batch_size: Annotated[
        int, typer.Option(help="Images per step; BN takes its statistics from these.")
    ] = DEFAULTS.batch_size,
    every: Annotated[
        int, typer.Option(help="Steps between validations: the resolution of all step counts.")
    ] = DEFAULTS.every,
    rates: Annotated[
        str, typer.Option(help="The learning rates from which the baseline gets its best.", metavar="R,R,...")
    ] = ",".join(map(str, RATES)),
    json: Annotated[
        Path | None, typer.Option(help="Also write every curve and figure to this file.", metavar="OUT")
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Train on so many threads; 0 takes as many as torch would. Changes no result.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(help="The folder for the records and the page, report.html.", metavar="DIR")
    ] = FOLDER,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Record the signal, and write the records and the page.")
    ] = True,
    open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Train one small Inception network with and without Batch Normalization, and count the steps.

    Figures 2 and 3 of the paper (Ioffe & Szegedy, 2015) on 1,797 handwritten digits that ship here: first
    without BN at its own best learning rate, then with BN at 1, 5 and 30 times that rate, then with sigmoids.

    Then the signal is recorded, what four layers of sigmoids are given without BN and with it, and all of it
    drawn on one page, report.html.

    It takes a minute or two. Ctrl-C ends it early and keeps the variants that are done.
    """
    options = Options(init, seeds, steps, batch_size, every, parse_rates(rates))
    if threads < 0:
        raise BatchNormError(f"--threads is {threads}", do="give a whole number, or 0 for torch's choice")
    if json is not None:
        check_target("--json", json)
    if report:
        check_folder("--out", out)

    import torch
    from rich.console import Console

    from batchnorm.lab.present import report as drawn
    from batchnorm.lab.progress import watching
    from batchnorm.lab.race import run
    from batchnorm.lab.store import to_records
    from batchnorm.lab.summary import summarise

    console = Console(highlight=False)
    threads = threads or torch.get_num_threads()
    with watching(console, steps) as watch:
        result = run(options, threads=threads, watch=watch)
    console.print(drawn(summarise(result), unicode=console.encoding.startswith("utf")))
    records = to_records(result, threads)
    if json is not None:
        written = records.write(json)
        say(f"Every curve is in {written}.")
    if report and result.lanes:
        result = write_race(records, result, out, console, open)
    if result.interrupted:
        raise typer.Exit(130)


def write_race(records: RecordFile, result: Result, out: Path, console: Console, open: bool) -> Result:
    """Write the records of a race, record the signal unless it was interrupted, and write the page of both.

    >>> write_race(records, result, Path("batchnorm-race"), Console(), open=False)  # doctest: +SKIP
    The page is batchnorm-race/report.html
    """
    from batchnorm.lab.demo import recorded
    from batchnorm.lab.signal import Recipe, write
    from batchnorm.report.load import Run
    from batchnorm.report.page import write_page

    records.write(out / "race.json")
    runs = [Run("race", records)]
    if not result.interrupted:
        try:
            # A short race is one to try things out: its signal is as short.
            signal = recorded(Recipe(steps=min(Recipe().steps, result.options.steps)), console)
            write(signal, out / SIGNAL)
            runs.append(Run("signal", signal))
        except KeyboardInterrupt:
            interrupts.accept()
            result = replace(result, interrupted=True)
    announce(write_page(runs, out / PAGE), open)
    return result
