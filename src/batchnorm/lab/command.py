"""``batchnorm race``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from batchnorm.errors import BatchNormError
from batchnorm.lab.options import INITS, RATES, Options, parse_rates

DEFAULTS = Options()


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
) -> None:
    """Train one small Inception network with and without Batch Normalization, and count the steps.

    Figures 2 and 3 of the paper (Ioffe & Szegedy, 2015) on 1,797 handwritten digits that ship here: first
    without BN at its own best learning rate, then with BN at 1, 5 and 30 times that rate, then with sigmoids.

    It takes a minute or two. Ctrl-C ends it early and keeps the variants that are done.
    """
    options = Options(init, seeds, steps, batch_size, every, parse_rates(rates))
    if threads < 0:
        raise BatchNormError(f"--threads is {threads}", do="give a whole number, or 0 for torch's choice")
    if json is not None:
        check_writable(json)

    import torch
    from rich.console import Console

    from batchnorm.lab.present import report
    from batchnorm.lab.progress import watching
    from batchnorm.lab.race import run
    from batchnorm.lab.store import to_records
    from batchnorm.lab.summary import summarise

    console = Console(highlight=False)
    threads = threads or torch.get_num_threads()
    with watching(console, steps) as watch:
        result = run(options, threads=threads, watch=watch)
    console.print(report(summarise(result), unicode=console.encoding.startswith("utf")))
    if json is not None:
        written = to_records(result, threads).write(json)
        console.print(f"Every curve is in {written}.", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before minutes are spent on what should go in it.

    >>> check_writable(Path("/"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --json is /, a directory; give the name of a file
    """
    if path.is_dir():
        raise BatchNormError(f"--json is {path}, a directory", do="give the name of a file")
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BatchNormError(f"--json is {path} but {nearest} cannot be written to", do="choose another place")
