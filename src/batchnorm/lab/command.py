"""``batchnorm race``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm import interrupts
from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.lab.depth.arms import DEPTHS, Settings, parse_depths
from batchnorm.lab.front import earlier
from batchnorm.lab.options import INITS, Options, parse_rates
from batchnorm.report.command import announce
from batchnorm.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.shelf import Shelf
    from batchnorm.records import RecordFile

FOLDER, PAGE, SIGNAL = Path("batchnorm-race"), "report.html", "signal.jsonl"
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
            help="With --model: labelled data; .npy, .npz, .pt, .safetensors, a folder of them, or file.py:factory."
        ),
    ] = "",
    seeds: Annotated[
        int | None,
        typer.Option(help="Fresh seeds of every arm; 3 can just give a verdict. By default 5, inception 3."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of every network. By default 1500, inception 800, --model 500.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples per step; BN takes its statistics from these.")] = 32,
    every: Annotated[
        int | None,
        typer.Option(help="Steps between validations: the resolution of step counts. By default 10, inception 20."),
    ] = None,
    rates: Annotated[
        str, typer.Option(help="The learning rates from which the best is chosen.", metavar="R,R,...")
    ] = "",
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
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Choose the rate of the network without BN anew for each target of steps."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the folder of --out.")] = False,
) -> None:
    """Train networks with and without Batch Normalization, and count the steps to the same accuracy.

    Figures 2 and 3 of the paper (Ioffe & Szegedy, 2015) on 1,797 handwritten digits that ship here: residual
    networks of 2 to 18 blocks, without BN at their own best learning rate, and with BN at 1, 5 and 30 times that
    rate; beside them SkipInit, gradient clipping and sigmoids. The answer at 10 blocks comes first.

    Then the signal is recorded, what four layers are given without BN and with it, and all of it drawn on one
    page, report.html.

    Examples:

      batchnorm race --open

      batchnorm race --network inception --init small-gaussian

      batchnorm race --model net.py:make --data train.npz --rates 0.01,0.03,0.1,0.3

    It takes a minute or two. Ctrl-C ends it early and keeps what is done; the same command goes on. A race that
    is finished is shown again, not run again, and one with other options is not replaced without --force.
    """
    if network not in NETWORKS:
        raise BatchNormError(f"--network is {network!r}", do=f"choose one of {', '.join(NETWORKS)}")
    check_belongs("--init", init, network == "inception" and not model, "--network inception")
    check_belongs("--depths", depths, network == "residual" and not model, "--network residual")
    check_belongs("--data", data, bool(model), "--model")
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
    settings = None if inception else Settings(**({"steps": OWN_STEPS} | chosen if model else chosen))
    if json is not None:
        check_target("--json", json)
    if report:
        check_folder("--out", out)

    import torch
    from rich.console import Console

    console = Console(highlight=False)
    threads = threads or torch.get_num_threads()
    asked = options or settings
    assert asked is not None
    command = "race --model" if model else "race" if inception else "race --network residual"
    about = {"command": command, **asdict(asked)}
    found, shelf = earlier(out if report else None, "race", about, force, resumed=not model)
    if options is not None:
        records = race_inception(options, threads, console, found, shelf)
    elif model:
        assert settings is not None
        records = race_own(model, data, settings, threads, console)
    else:
        assert settings is not None
        records = race_residual(settings, threads, console, found, shelf)
    if json is not None:
        say(f"Every curve is in {records.write(json)}.")
    interrupted = bool(records.summary["interrupted"])
    if report and records.measurements:
        interrupted = write_race(records, out, console, open, recorded_before=found is not None)
        if shelf is not None and not interrupted:
            shelf.clear()
    if interrupted:
        raise typer.Exit(130)


def race_residual(
    settings: Settings,
    threads: int,
    console: Console,
    found: RecordFile | None = None,
    shelf: Shelf | None = None,
) -> RecordFile:
    """Race the residual networks, print the answer as soon as it is known and the rest at the end.

    A race that was ``found`` finished is printed again; what is on the ``shelf`` is not trained again.

    >>> race_residual(Settings(), threads=2, console=Console())  # doctest: +SKIP
    """
    from rich.console import Console
    from rich.text import Text

    from batchnorm.lab.depth.outcome import Outcome
    from batchnorm.lab.depth.present import answer, rest
    from batchnorm.lab.depth.progress import watching
    from batchnorm.lab.depth.run import planned, run
    from batchnorm.lab.depth.store import from_records, to_records

    unicode = console.encoding.startswith("utf")
    answered = []

    def show(outcome: Outcome) -> None:
        answered.append(outcome)
        for line in answer(outcome, unicode=unicode):
            console.print(Text(line), soft_wrap=True)

    seen = console if console.is_terminal else Console(stderr=True, highlight=False)  # the answer comes first
    if found is not None:
        outcome = from_records(found)
    else:
        with watching(seen, settings.steps, planned(settings)) as watch:
            outcome = run(settings, threads=threads, watch=watch, answer=show, shelf=shelf)
    if not answered:
        show(outcome)
    console.print(rest(outcome, unicode=unicode))
    return found or to_records(outcome, threads)


def race_own(model: str, data: str, settings: Settings, threads: int, console: Console) -> RecordFile:
    """Race the user's network and print what came of it.

    >>> race_own("net.py:make", "train.npz", Settings(), threads=2, console=Console())  # doctest: +SKIP
    """
    from rich.console import Console

    from batchnorm.lab.depth.arms import TUNING_SEEDS
    from batchnorm.lab.depth.progress import watching
    from batchnorm.lab.own.present import lines
    from batchnorm.lab.own.race import run
    from batchnorm.lab.own.store import to_records
    from batchnorm.lab.own.subject import load

    subject = load(model, data, [*TUNING_SEEDS, *range(settings.seeds)], settings.batch_size)
    seen = console if console.is_terminal else Console(stderr=True, highlight=False)
    networks = 2 * (len(TUNING_SEEDS) * len(settings.rates) + settings.seeds)
    with watching(seen, settings.steps, networks * settings.steps) as watch:
        duel = run(model, subject, settings, threads=threads, watch=watch)
    for line in lines(duel):
        say(line)
    return to_records(duel, threads)


def race_inception(
    options: Options, threads: int, console: Console, found: RecordFile | None = None, shelf: Shelf | None = None
) -> RecordFile:
    """Race the small Inception and print its tables.

    >>> race_inception(Options(), threads=2, console=Console())  # doctest: +SKIP
    """
    from batchnorm.lab.present import report as drawn
    from batchnorm.lab.progress import watching
    from batchnorm.lab.race import run
    from batchnorm.lab.store import from_records, to_records
    from batchnorm.lab.summary import summarise

    if found is not None:
        result = from_records(found)
    else:
        with watching(console, options.steps) as watch:
            result = run(options, threads=threads, watch=watch, shelf=shelf)
    console.print(drawn(summarise(result), unicode=console.encoding.startswith("utf")))
    return found or to_records(result, threads)


def write_race(records: RecordFile, out: Path, console: Console, open: bool, *, recorded_before: bool = False) -> bool:
    """Write the records of a race, record the signal unless it was interrupted, and write the page of both.

    Returns whether an interrupt ended any of it.

    >>> write_race(records, Path("batchnorm-race"), Console(), open=False)  # doctest: +SKIP
    The page is batchnorm-race/report.html
    """
    from batchnorm.lab.demo import recorded
    from batchnorm.lab.own.store import COMMAND as OWN_COMMAND
    from batchnorm.lab.signal import Recipe, write
    from batchnorm.records import read
    from batchnorm.report.load import Run
    from batchnorm.report.page import write_page

    records.write(out / "race.json")
    runs, interrupted = [Run("race", records)], bool(records.summary["interrupted"])
    if not interrupted and records.command != OWN_COMMAND:  # a film of other layers says nothing about those
        try:
            # A short race is one to try things out: its signal is as short.
            steps = (records.configuration.get("settings") or records.configuration["options"])["steps"]
            if recorded_before and (out / SIGNAL).exists():
                signal = read(out / SIGNAL)
            else:
                signal = recorded(replace(Recipe(), steps=min(Recipe().steps, steps)), console)
                write(signal, out / SIGNAL)
            runs.append(Run("signal", signal))
        except KeyboardInterrupt:
            interrupts.accept()
            interrupted = True
    announce(write_page(runs, out / PAGE), open)
    return interrupted


def check_belongs(option: str, value: str, fits: bool, what: str) -> None:
    """Refuse an option that another race has.

    >>> check_belongs("--init", "he", False, "--network inception")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --init is an option of --network inception; add it, or leave this out
    """
    if value and not fits:
        raise BatchNormError(f"{option} is an option of {what}", do="add it, or leave this out")
