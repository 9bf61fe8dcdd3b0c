"""``batchnorm race``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm import interrupts
from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.lab.demo import signal_of
from batchnorm.lab.depth.arms import DEPTHS, SMALL, DepthSettings, parse_depths, settings_for
from batchnorm.lab.front import (
    PAGE,
    SIGNAL,
    BatchSize,
    Force,
    Json,
    Open,
    Out,
    Rates,
    Threads,
    recorded,
    run_of,
    watched,
)
from batchnorm.lab.options import INITS, Options, parse_rates
from batchnorm.lab.runs.command import give_data
from batchnorm.records import RecordFile
from batchnorm.report.command import announce
from batchnorm.terminal import note, say

if TYPE_CHECKING:
    from rich.console import Console

FOLDER, RECORDS = Path("batchnorm-race"), "race.json"
NETWORKS = ("residual", "inception")
OWN_STEPS = 500


def race(
    network: Annotated[
        str, typer.Option(help="residual: networks of several depths. inception: one small Inception.")
    ] = NETWORKS[0],
    model: Annotated[
        str, typer.Option(help="Race your own network instead: file.py:factory or package.module:factory.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            help="With --model: labelled data; .npy, .npz, .pt, .safetensors, a folder of them, or file.py:factory. "
            "With --size medium: the folder of data sets, which has fashion-mnist; by default $BATCHNORM_DATA."
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(help="small: fully connected, on digits. medium: convolutional, on Fashion-MNIST, with momentum."),
    ] = SMALL,
    seeds: Annotated[
        int | None,
        typer.Option(help="Fresh seeds of every arm; 3 can just give a verdict. By default 5, inception and medium 3."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps of every network. By default 1500, medium 600, inception 800, --model 500."),
    ] = None,
    batch_size: BatchSize = 32,
    every: Annotated[
        int | None,
        typer.Option(
            help="Steps between validations: the resolution of step counts. By default 10, medium 25, inception 20."
        ),
    ] = None,
    rates: Rates = "",
    depths: Annotated[
        str,
        typer.Option(
            help=f"Residual blocks of the networks; by default {','.join(map(str, DEPTHS))}.", metavar="N,N,..."
        ),
    ] = "",
    init: Annotated[
        str,
        typer.Option(help=f"With --network inception: how weights begin, {', '.join(INITS)}; by default xavier."),
    ] = "",
    json: Json = None,
    threads: Threads = 0,
    out: Out = FOLDER,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Record the signal, and write the records and the page.")
    ] = True,
    open: Open = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Choose the rate of the network without BN anew for each target of steps."),
    ] = False,
    force: Force = False,
) -> None:
    """Train networks with and without Batch Normalization, and count the steps to the same accuracy.

    Figures 2 and 3 of the paper (Ioffe & Szegedy, 2015) on 1,797 handwritten digits that ship here: residual
    networks of 2 to 18 blocks, without BN at their own best learning rate, and with BN at 1, 5 and 30 times that
    rate; beside them SkipInit, gradient clipping and sigmoids. The answer at 10 blocks comes first.

    Then the signal is recorded, what four layers are given without BN and with it, and all of it drawn on one
    page, report.html.

    Examples:

      batchnorm race --open

      batchnorm race --size medium --data ~/data

      batchnorm race --network inception --init small-gaussian

      batchnorm race --model net.py:make --data train.npz --rates 0.01,0.03,0.1,0.3

    It takes a minute or two, --size medium about half an hour. Ctrl-C ends it early and keeps what is done; the
    same command goes on. A race that is finished is shown again, not run again, and one with other options is not
    replaced without --force.
    """
    if network not in NETWORKS:
        raise BatchNormError(f"--network is {network!r}", do=f"choose one of {', '.join(NETWORKS)}")
    check_belongs("--init", init, network == "inception" and not model, "--network inception")
    check_belongs("--depths", depths, network == "residual" and not model, "--network residual")
    check_belongs("--size", size if size != SMALL else "", network == "residual" and not model, "--network residual")
    check_belongs("--data", data, bool(model) or size != SMALL, "--model and of --size medium")
    if model and not data:
        raise BatchNormError("--model needs data to train on", do="add --data train.npz, or --data file.py:factory")
    if threads < 0:
        raise BatchNormError(f"--threads is {threads}", do="give a whole number, or 0 for torch's choice")
    given: dict[str, Any] = {"seeds": seeds, "steps": steps, "batch_size": batch_size, "every": every}
    given |= {"rates": parse_rates(rates) if rates else None, "init": init or None}
    if strict and (model or network == "inception"):
        raise BatchNormError("--strict is an option of --network residual", do="add it, or leave this out")
    given["strict"] = strict or None
    given["depths"] = parse_depths(depths) if depths else None
    chosen = {name: value for name, value in given.items() if value is not None}
    inception = network == "inception" and not model
    options = Options(**chosen) if inception else None
    settings = None if inception else settings_for(size, **({"steps": OWN_STEPS} | chosen if model else chosen))
    if json is not None:
        check_target("--json", json, force)
    if report:
        check_folder("--out", out)

    import torch
    from rich.console import Console

    console = Console(highlight=False)
    threads = threads or torch.get_num_threads()
    place = out if report else None
    if options is not None:
        records = race_inception(options, threads, console, place, force)
    elif model:
        assert settings is not None
        records = race_own(model, data, settings, threads, console, place, force)
    else:
        assert settings is not None
        give_data(data)
        records = race_residual(settings, threads, console, place, force)
    interrupted = bool(records.summary["interrupted"])
    if json is not None and not (report and interrupted):  # what goes on later writes it then
        note(f"Every curve is in {records.write(json)}.")
    if report and records.measurements:
        interrupted = write_race(records, out, console, open)
    if interrupted:
        raise typer.Exit(130)


def race_residual(
    settings: DepthSettings, threads: int, console: Console, out: Path | None = None, force: bool = False
) -> RecordFile:
    """Race the residual networks, print the answer as soon as it is known and the rest at the end.

    >>> race_residual(DepthSettings(), threads=2, console=Console())  # doctest: +SKIP
    """
    from rich.text import Text

    from batchnorm.lab import as_runs
    from batchnorm.lab.depth.outcome import DepthOutcome
    from batchnorm.lab.depth.present import answer, rest
    from batchnorm.lab.depth.records import from_records
    from batchnorm.lab.depth.run import examples_for, planned
    from batchnorm.lab.train import check_batch

    check_batch(settings.batch_size, len(examples_for(settings).train_labels))
    unicode = console.encoding.startswith("utf")
    answered = []

    def show(outcome: DepthOutcome) -> None:
        answered.append(outcome)
        for line in answer(outcome, unicode=unicode):
            console.print(Text(line), soft_wrap=True)

    with watched(console, settings.steps, planned(settings)) as watch:
        records = recorded(
            run_of("race", settings),
            as_runs.race,
            threads=threads,
            file=out and out / RECORDS,
            keep=out is not None,
            force=force,
            watch=watch,
            answer=show,
        )
    outcome = from_records(records)
    if not answered:
        show(outcome)
    console.print(rest(outcome, unicode=unicode))
    return records


def race_own(
    model: str,
    data: str,
    settings: DepthSettings,
    threads: int,
    console: Console,
    out: Path | None = None,
    force: bool = False,
) -> RecordFile:
    """Race the user's network and print what came of it.

    >>> race_own("net.py:make", "train.npz", DepthSettings(), threads=2, console=Console())  # doctest: +SKIP
    """
    from batchnorm.lab import as_runs
    from batchnorm.lab.own.present import lines
    from batchnorm.lab.own.race import planned
    from batchnorm.lab.own.records import from_records
    from batchnorm.lab.train import check_batch

    subject = as_runs.subject_of(model, data, settings)
    check_batch(settings.batch_size, len(subject.data.train_labels))
    asked = run_of("race --model", settings, model=model, data=data, checksum=subject.checksum)
    with watched(console, settings.steps, planned(settings)) as watch:
        records = recorded(
            asked,
            as_runs.race_own,
            threads=threads,
            file=out and out / RECORDS,
            keep=out is not None,
            force=force,
            subject=subject,
            watch=watch,
        )
    for line in lines(from_records(records)):
        say(line)
    return records


def race_inception(
    options: Options, threads: int, console: Console, out: Path | None = None, force: bool = False
) -> RecordFile:
    """Race the small Inception and print its tables.

    >>> race_inception(Options(), threads=2, console=Console())  # doctest: +SKIP
    """
    from batchnorm.lab import as_runs
    from batchnorm.lab.data import digits
    from batchnorm.lab.present import report as drawn
    from batchnorm.lab.race import planned
    from batchnorm.lab.records import from_records
    from batchnorm.lab.summary import summarise
    from batchnorm.lab.train import check_batch

    check_batch(options.batch_size, len(digits.load().train_labels))
    asked = run_of("race --network inception", options)
    with watched(console, options.steps, planned(options)) as watch:
        records = recorded(
            asked,
            as_runs.race_inception,
            threads=threads,
            file=out and out / RECORDS,
            keep=out is not None,
            force=force,
            watch=watch,
        )
    console.print(drawn(summarise(from_records(records)), unicode=console.encoding.startswith("utf")))
    return records


def write_race(records: RecordFile, out: Path, console: Console, open: bool) -> bool:
    """Write the records of a race, record the signal unless it was interrupted, and write the page of both.

    Returns whether an interrupt ended any of it.

    >>> write_race(records, Path("batchnorm-race"), Console(), open=False)  # doctest: +SKIP
    The page is batchnorm-race/report.html
    """
    from batchnorm.lab.own.records import COMMAND as OWN_COMMAND
    from batchnorm.lab.signal import SignalRecipe, write
    from batchnorm.report.load import Run
    from batchnorm.report.page import write_page

    records.write(out / RECORDS)
    runs, interrupted = [Run("race", records)], bool(records.summary["interrupted"])
    if not interrupted and records.command != OWN_COMMAND:  # a film of other layers says nothing about those
        try:
            # A short race is one to try things out: its signal is as short.
            steps = (records.configuration.get("settings") or records.configuration["options"])["steps"]
            signal = signal_of(replace(SignalRecipe(), steps=min(SignalRecipe().steps, steps)), console)
            write(signal, out / SIGNAL)
            runs.append(Run("signal", signal))
        except KeyboardInterrupt:
            interrupts.accept()
            interrupted = True
    announce(write_page(runs, out / PAGE), open)
    return interrupted


def check_belongs(option: str, value: str, fits: bool, what: str) -> None:
    """Raise for an option that another race has.

    >>> check_belongs("--init", "he", False, "--network inception")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --init is an option of --network inception; add it, or leave this out
    """
    if value and not fits:
        raise BatchNormError(f"{option} is an option of {what}", do="add it, or leave this out")
