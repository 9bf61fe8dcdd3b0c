"""``batchnorm landscape``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchnorm.lab.front import (
    BatchSize,
    Force,
    Images,
    Json,
    Open,
    Out,
    Report,
    Svg,
    Threads,
    check_outputs,
    leave,
    recorded,
    run_of,
    watched,
)
from batchnorm.lab.landscape.settings import LandscapeSettings
from batchnorm.terminal import say

FOLDER = Path("batchnorm-landscape")


def landscape(
    data: Images = "",
    seeds: Annotated[int, typer.Option(help="Seeds of both networks; 3 can just give a verdict.")] = 5,
    steps: Annotated[int | None, typer.Option(help="Training steps. By default 2000 with --data, else 400.")] = None,
    batch_size: BatchSize = 128,
    records: Annotated[int, typer.Option(help="Measure at so many steps, evenly in log time.")] = 40,
    rate: Annotated[float, typer.Option(help="The learning rate of both networks.")] = 0.1,
    layers: Annotated[int, typer.Option(help="Hidden layers of both networks.")] = 8,
    json: Json = None,
    svg: Svg = None,
    threads: Threads = 0,
    out: Out = FOLDER,
    report: Report = True,
    open: Open = False,
    force: Force = False,
) -> None:
    """Measure how smooth the loss is along the gradient, with Batch Normalization and without.

    After Santurkar et al. (2018): before the recorded steps, walk along the gradient by 1/2 to 4 times the
    learning rate; the bands of the losses and of the changes of the gradient, over training. Raw, and corrected
    for the norm of the weights: with Batch Normalization, larger weights compute the same, but their gradients
    are smaller, so the raw bands tell the scale of the weights, too.

    Examples:

      batchnorm landscape --open

      batchnorm landscape --data mnist/ --rate 0.03

    Seconds on the digits. Ctrl-C ends it early and keeps a network that is done.
    """
    check_outputs(threads, json, svg, out if report else None, force)
    settings = LandscapeSettings(seeds, steps, batch_size, records, rate, layers)

    import torch
    from rich.console import Console

    from batchnorm.lab import as_runs
    from batchnorm.lab.landscape.figures import draw
    from batchnorm.lab.landscape.present import lines
    from batchnorm.lab.landscape.records import COMMAND, from_records
    from batchnorm.lab.landscape.run import planned
    from batchnorm.lab.sources import load
    from batchnorm.lab.train import check_batch

    source = load(data)
    settings = settings.given_data(bundled=source.bundled)
    check_batch(settings.batch_size, len(source.report.train_labels))
    asked, place = run_of(COMMAND, settings, data=source.checksum), out if report else None
    with watched(Console(highlight=False), settings.steps or 0, planned(settings)) as watch:
        found = recorded(
            asked,
            as_runs.landscape,
            threads=threads or torch.get_num_threads(),
            file=out / f"{COMMAND}.json",
            keep=report,
            force=force,
            source=source,
            watch=watch,
        )
    outcome = from_records(found)
    for line in lines(outcome):
        say(line)
    leave(found, draw, json=json, svg=svg, out=place, open=open)
    if outcome.interrupted:
        raise typer.Exit(130)
