"""``batchnorm figure1``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchnorm.lab.figure1.settings import INITS, Figure1Settings, parse_inits
from batchnorm.lab.front import (
    BatchSize,
    Force,
    Images,
    Json,
    Open,
    Out,
    Rates,
    Report,
    Svg,
    Threads,
    check_outputs,
    leave,
    recorded,
    run_of,
    watched,
)
from batchnorm.lab.networks.schemes import SCHEMES
from batchnorm.lab.options import parse_rates
from batchnorm.terminal import say

FOLDER = Path("batchnorm-figure1")


def figure1(
    data: Images = "",
    seeds: Annotated[int, typer.Option(help="Fresh seeds of every network; 3 can just give a verdict.")] = 5,
    steps: Annotated[
        int | None, typer.Option(help="Training steps. By default the paper's 50000 with --data, else 3000.")
    ] = None,
    batch_size: BatchSize = 60,
    every: Annotated[
        int | None, typer.Option(help="Steps between validations; by default a hundredth of the steps.")
    ] = None,
    rates: Rates = "",
    init: Annotated[
        str,
        typer.Option(
            help=f"How weights begin; the first start makes the figure. Choose from {', '.join(SCHEMES)}.",
            metavar="START,...",
        ),
    ] = ",".join(INITS),
    json: Json = None,
    svg: Svg = None,
    threads: Threads = 0,
    out: Out = FOLDER,
    report: Report = True,
    open: Open = False,
    force: Force = False,
) -> None:
    """Follow what a sigmoid is given while its network learns, with Batch Normalization and without.

    Figure 1 of the paper (Ioffe & Szegedy, 2015): three layers of 100 sigmoids read binary images; the accuracy,
    and the 15th, 50th and 85th percentiles of the inputs of a typical sigmoid of the last hidden layer, both
    networks side by side. Each has its own best learning rate. With MNIST's files it is the paper's
    experiment; on the digits that ship here it is a smaller one, and says so.

    Examples:

      batchnorm figure1 --open

      batchnorm figure1 --data mnist/ --rates 1,3 --seeds 3

      batchnorm figure1 --init xavier --svg figure1.svg

    Half a minute to a minute on the digits, about an hour on MNIST. Ctrl-C ends it early and keeps what is done.
    """
    check_outputs(threads, json, svg, out if report else None, force)
    given: dict[str, Any] = {"rates": parse_rates(rates)} if rates else {}
    settings = Figure1Settings(seeds, steps, batch_size, every, inits=parse_inits(init), **given)

    import torch
    from rich.console import Console

    from batchnorm.lab import as_runs
    from batchnorm.lab.figure1.figures import draw
    from batchnorm.lab.figure1.present import lines
    from batchnorm.lab.figure1.records import COMMAND, from_records
    from batchnorm.lab.figure1.run import planned
    from batchnorm.lab.sources import load
    from batchnorm.lab.train import check_batch

    console = Console(highlight=False)
    source = load(data, binary=True)
    settings = settings.given_data(bundled=source.bundled)
    threads = threads or torch.get_num_threads()
    check_batch(settings.batch_size, len(source.tuning.train_labels))
    asked, place = run_of(COMMAND, settings, data=source.checksum), out if report else None
    with watched(console, settings.amounts[0], planned(settings)) as watch:
        records = recorded(
            asked,
            as_runs.figure1,
            threads=threads,
            file=out / f"{COMMAND}.json",
            keep=report,
            force=force,
            source=source,
            watch=watch,
        )
    outcome = from_records(records)
    for line in lines(outcome):
        say(line)
    leave(records, draw, json=json, svg=svg, out=place, open=open)
    if outcome.interrupted:
        raise typer.Exit(130)
