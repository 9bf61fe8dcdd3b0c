"""``batchnorm lab``: runs as folders; torch is imported only where something runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm.errors import BatchNormError, printable
from batchnorm.files import check_target
from batchnorm.lab.judge.command import table as print_claims
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import (
    CHECKPOINT,
    DEFAULT,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    VARIABLE,
    WAITING,
    Folder,
    Store,
)
from batchnorm.options import Force
from batchnorm.report.command import announce, page_named
from batchnorm.terminal import note, say

if TYPE_CHECKING:
    from batchnorm.lab.judge.claim import Claim
    from batchnorm.lab.runs.local import RunsOutcome

DAMAGED = "damaged"  # in the list: a file of the run cannot be read
WIDEST = 200  # characters of a figure or a curve; the files have the rest
WIDE = 1000  # characters of a line that goes to a file or a pipe

lab = typer.Typer(
    name="lab",
    help="Experiments as runs: each a folder that survives a kill, is resumed, and is never made twice.",
    no_args_is_help=True,
)
StoreOption = Annotated[
    str, typer.Option("--store", help=f"The folder of runs; by default ${VARIABLE}, or ./{DEFAULT}.", metavar="DIR")
]
On = Annotated[
    str, typer.Option("--on", help="local, ray (RAY_ADDRESS, or this machine) or ray://HOST:PORT.", metavar="WHERE")
]
Workers = Annotated[int, typer.Option(help="Runs at the same time on this machine; 0 chooses.", min=0)]
Threads = Annotated[int, typer.Option(help="Threads of each run; 0 divides the cores among the workers.", min=0)]
Data = Annotated[
    str, typer.Option("--data", help="The folder of data sets; by default $BATCHNORM_DATA.", metavar="DIR")
]


@lab.command()
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Claims, or one experiment; see batchnorm claims and lab options."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All claims.")] = False,
    budget: Annotated[
        str, typer.Option(help="Of claims: quick (minutes) or full (hours).", metavar="quick|full")
    ] = "quick",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option; values with commas between them make a run each.", metavar="NAME=A,B"),
    ] = None,
    store: StoreOption = "",
    data: Data = "",
    on: On = "local",
    workers: Workers = 0,
    threads: Threads = 0,
) -> None:
    """Carry out claims or experiments: what is finished is not run again, what was cut off goes on.

    Examples:

      batchnorm lab run noise landscape

      batchnorm lab run --all --budget quick

      batchnorm lab run train --set norm=batch,none --set rate=0.03,0.1,0.3

      batchnorm lab run train --set data=mnist --set network=conv --data ~/data --on ray

      torchrun --nproc-per-node 2 -m batchnorm lab run train --set steps=200

    Ctrl-C writes checkpoints and ends; the same command, or batchnorm lab resume, goes on.
    """
    give_data(data)
    place = Store(store)
    claimed, runs = asked(names or [], everything, budget, settings or [])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if on != "local" or claimed:
            what = "claims are" if claimed else f"--on {on} is"
            raise BatchNormError(f"{what} given under torchrun", do="run it without torchrun")
        together(place, runs, threads)
        return
    # Each run of a claim computes on one thread, whatever the machine, so that all give the same numbers.
    carry_out(place, [place.add(each) for each in runs], on, workers, threads or int(bool(claimed)))
    if claimed:
        from batchnorm.lab.judge.measure import state_of

        print_claims([state_of(each, place) for each in claimed])


def asked(names: list[str], everything: bool, budget: str, settings: list[str]) -> tuple[list[Claim], list[LabRun]]:
    """Return the claims that were named, and the runs that they, or the experiment, ask for."""
    from batchnorm.lab.claims import all_claims, claim_named
    from batchnorm.lab.judge.claim import BUDGETS
    from batchnorm.lab.runs.experiments import EXPERIMENTS, runs_of

    if not names and not everything:
        raise BatchNormError("nothing is named to run", do="name claims or an experiment, or give --all")
    if names and everything:
        raise BatchNormError("--all is given beside names", do="leave one of them out")
    if budget not in BUDGETS:
        raise BatchNormError(f"--budget is {budget!r}", do=f"choose one of {', '.join(BUDGETS)}")
    if names and names[0] in EXPERIMENTS:
        if len(names) > 1:
            raise BatchNormError(f"{names[0]} is an experiment, given beside {names[1]}", do="run it by itself")
        return [], runs_of(names[0], settings)
    if settings:
        raise BatchNormError("--set is given beside claims, which fix their options", do="leave it out")
    claims = all_claims() if everything else [claim_named(name) for name in dict.fromkeys(names)]
    return claims, [each for claim in claims for each in claim.runs(budget)]


@lab.command()
def resume(
    store: StoreOption = "",
    data: Data = "",
    on: On = "local",
    workers: Workers = 0,
    threads: Threads = 0,
) -> None:
    """Go on with every run of the store that is not finished.

    Examples:

      batchnorm lab resume

      batchnorm lab resume --store /shared/runs --on ray://head:10001
    """
    give_data(data)
    place = existing(store)
    folders, foreign = place.runs()
    for sentence in foreign:
        say(sentence, error=True)
    waiting = [folder for folder in folders if folder.state not in (FINISHED, RUNNING)]
    if not waiting:
        say(f"All {len(folders)} runs of {place.root} are finished, or under way.")
        return
    carry_out(place, waiting, on, workers, threads)


@lab.command("list")
def list_(
    store: StoreOption = "",
    states: Annotated[str, typer.Option("--state", help="Only runs in this state.", metavar="STATE")] = "",
) -> None:
    """List the runs of the store: state, name, what each came to.

    Examples:

      batchnorm lab list

      batchnorm lab list --state failed
    """
    known = (FINISHED, RUNNING, INTERRUPTED, FAILED, WAITING)
    if states and states not in known:
        raise BatchNormError(f"--state is {states!r}", do=f"choose one of {', '.join(known)}")
    from rich.table import Table
    from rich.text import Text

    place = existing(store)
    folders, foreign = place.runs()
    table = Table("run", "state", "began", "name", "result", box=None, pad_edge=False)
    for folder in folders:
        state = folder.state
        if not states or state == states:
            try:
                came_to = standing(folder, state)
            except BatchNormError as error:
                state, came_to = DAMAGED, ""
                foreign.append(str(error))
            began = folder.read("run.json")["created"][:16].replace("T", " ")
            cells = (folder.path.name, state, began, folder.run.name, came_to)
            table.add_row(*(Text(printable(cell)) for cell in cells))
    if table.row_count:
        on_console(table)
    else:
        say(f"{place.root} has no runs{f' that are {states}' if states else ''}.")
    for sentence in foreign:
        say(sentence, error=True)


@lab.command()
def show(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The key of a run, its beginning, or its name.")],
    store: StoreOption = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="Also draw its curves on this page.", metavar="FILE")
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    force: Force = False,
) -> None:
    """Show one run: what was asked, where it ran, what it measured.

    Examples:

      batchnorm lab show 3f9a

      batchnorm lab show 3f9a --open
    """
    place = existing(store)
    folder = place.find(name)
    state = folder.state
    say(f"{folder.run.name or folder.path.name} ({state}), in {folder.path}")
    for option, value in folder.run.options.items():
        say(f"  {option}: {value}")
    for number, attempt in enumerate(folder.attempts(), start=1):
        about = ", ".join(f"{key} {value}" for key, value in attempt.items() if value not in ("", None))
        say(f"start {number}: {about}")
    lines = folder.metrics()
    if lines:
        say(f"metrics, {len(lines)} lines; the last: " + ", ".join(f"{k} {_figure(v)}" for k, v in lines[-1].items()))
    if failure := folder.failure():
        say(f"failed: {failure}")
        say(f"  what it printed is in {folder.path / 'output.txt'}")
    if state == FINISHED:
        for key, value in folder.result().items():
            say(f"result, {key}: {_figure(value)}")
    elif state != RUNNING:
        say(f"go on with: batchnorm lab resume{where(place)}")
    if out is not None or open:
        draw([folder], out or place.root / f"{folder.path.name}.html", open, force=force or out is None)


@lab.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Keys of runs, their beginnings, or names.")],
    store: StoreOption = "",
    out: Annotated[Path | None, typer.Option("--out", help="Write the page here.", metavar="FILE")] = None,
    open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    force: Force = False,
) -> None:
    """Compare runs: the options in which they differ, what each came to, and their curves on one page.

    Examples:

      batchnorm lab compare 3f9a a071 --open
    """
    if len(names) < 2:
        raise BatchNormError("one run was named", do="name two or more")
    place = existing(store)
    page = out or place.root / "compare.html"
    draw([place.find(name) for name in names], page, open, table=True, force=force or out is None)


@lab.command()
def clean(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs to delete, by key or name.")
    ] = None,
    store: StoreOption = "",
    states: Annotated[
        str, typer.Option("--state", help="Delete all runs in this state.", metavar="failed|interrupted|waiting")
    ] = "",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Delete only the checkpoints of finished runs.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs that are not wanted any more, after a question. Other folders are left alone.

    Examples:

      batchnorm lab clean --state failed

      batchnorm lab clean 3f9a a071 --yes

      batchnorm lab clean --checkpoints
    """
    place = existing(store)
    if bool(names) + bool(states) + checkpoints != 1:
        raise BatchNormError("nothing says what to delete", do="name runs, or give --state or --checkpoints")
    if states and states not in (FAILED, INTERRUPTED, WAITING):
        raise BatchNormError(f"--state is {states!r}", do="choose failed, interrupted or waiting, or name runs")
    folders = [place.find(name) for name in names] if names else place.runs()[0]
    if states:
        folders = [folder for folder in folders if folder.state == states]
    if checkpoints:
        folders = [folder for folder in folders if folder.finished and (folder.path / CHECKPOINT).exists()]
    refuse_busy(folders)
    if not folders:
        say("There is nothing to delete.")
        return
    what = "the checkpoints of " if checkpoints else ""
    for folder in folders:
        say(f"{folder.path.name}  {folder.run.name}")
    if not yes and not typer.confirm(f"Delete {what}{len(folders)} run{'s' * (len(folders) > 1)}?"):
        return
    refuse_busy(folders)  # some may have been started while the question waited
    for folder in folders:
        if checkpoints:
            (folder.path / CHECKPOINT).unlink(missing_ok=True)
        elif left := folder.delete():
            say(f"{folder.path} is kept: {', '.join(left[:3])} {'is' if len(left) == 1 else 'are'} not of the run.")
    say(f"Deleted {what}{len(folders)} run{'s' * (len(folders) > 1)}.")


def refuse_busy(folders: list[Folder]) -> None:
    """Raise for to delete what another process is at."""
    busy = [folder.path.name for folder in folders if folder.state == RUNNING]
    if busy:
        raise BatchNormError(f"{', '.join(busy)} is under way", do="end it first")


@lab.command()
def options(
    experiment: Annotated[str, typer.Argument(metavar="[EXPERIMENT]", help="One of those listed without it.")] = "",
) -> None:
    """List the experiments, or the options of one with their defaults.

    Examples:

      batchnorm lab options

      batchnorm lab options train
    """
    from batchnorm.lab.runs.experiments import EXPERIMENTS, module_of

    if not experiment:
        for name, (_, about) in EXPERIMENTS.items():
            say(f"{name}: {about}")
        return
    for option in module_of(experiment).OPTIONS:
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        default = str(option.default) if option.default != "" else "none"
        say(f"{option.name}={default}  {option.help}{choices}")


def carry_out(place: Store, folders: list[Folder], on: str, workers: int, threads: int) -> RunsOutcome:
    """Carry out runs here or on a cluster, show where they stand, and say what came of them."""
    from rich.console import Console

    from batchnorm.lab.runs.display import watching
    from batchnorm.lab.runs.local import run_locally

    console = Console(highlight=False)
    before = sum(folder.finished for folder in folders)
    with watching(console, folders) as watch:
        if on == "local":
            outcome = run_locally(place, folders, workers=workers, threads=threads, watch=watch)
        elif on == "ray" or on.startswith("ray:"):
            from batchnorm.lab.runs.on_ray import run_on_ray

            outcome = run_on_ray(place, folders, on=on, threads=threads, watch=watch)
        else:
            raise BatchNormError(f"--on is {on!r}", do="give local, ray or ray://HOST:PORT")
    again = f" ({before} had been before)" if before else ""
    say(f"{len(outcome.finished)} of {len(folders)} runs are finished{again}, in {place.root}.")
    for key, why in outcome.failed.items():
        say(f"{key} failed: {why}", error=True)
    if outcome.left:
        say(f"{len(outcome.left)} were left; go on with: batchnorm lab resume{where(place)}")
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)
    if len(folders) == 1:
        note(f"See batchnorm lab show {folders[0].path.name}{where(place)}")
    return outcome


def together(place: Store, runs: Any, threads: int) -> None:
    """Carry out runs in the processes that torchrun started."""
    import torch

    from batchnorm.lab.runs import ranks

    threads = threads or torch.get_num_threads()
    with ranks.joined():
        ranks.carry_out_together(place, runs, threads, say)


def draw(folders: list[Folder], page: Path, open: bool, *, table: bool = False, force: bool = False) -> None:
    """Draw runs on a page, and print where they differ."""
    from rich.table import Table
    from rich.text import Text

    from batchnorm.lab.runs.compare import COMMAND, short, to_records
    from batchnorm.lab.runs.compare import compare as compared
    from batchnorm.report.load import Run as Drawn
    from batchnorm.report.page import write_page

    page = page_named(str(page))
    check_target("--out", page, force)
    comparison = compared(folders)
    if table:
        grid = Table("", *(folder.path.name for folder in folders), box=None, pad_edge=False)
        for name, values in (*comparison.options.items(), *comparison.results.items()):
            grid.add_row(*(Text(printable(str(cell))) for cell in (name, *map(short, values))))
        on_console(grid)
    announce(write_page([Drawn(COMMAND, to_records(comparison))], page), open)


def on_console(table: Any) -> None:
    """Print a table; where no terminal limits its width, one line for each row."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def existing(store: str) -> Store:
    """Return a store that is there."""
    place = Store(store)
    if not place.root.is_dir():
        raise BatchNormError(f"there is no store {place.root}", do="give its folder as --store, or run something first")
    return place


def standing(folder: Folder, state: str) -> str:
    """Say in a few words what a run came to, or where it stands."""
    from batchnorm.lab.runs.display import headline

    if state == FINISHED:
        return headline(folder)
    if state == FAILED:
        return folder.failure()
    stands = folder.progress()
    return f"{stands['done']:,} of {stands['total']:,}" if stands else ""


def where(place: Store) -> str:
    """Return the option that names this store again, nothing where it is the default."""
    import shlex

    return "" if place.root == Store().root else f" --store {shlex.quote(str(place.root))}"


def give_data(folder: str) -> None:
    """Let this process, and the workers it starts, find data sets in a folder."""
    if folder:
        if not Path(folder).is_dir():
            raise BatchNormError(f"--data is {folder}, which is not a folder", do="name the folder of the data sets")
        os.environ["BATCHNORM_DATA"] = str(Path(folder).absolute())


def _figure(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]} ..."
