"""``batchnorm watch-demo``: the film alone, in a quarter of a minute; torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.errors import BatchNormError
from batchnorm.files import check_folder, check_target
from batchnorm.lab.front import PAGE, SIGNAL, Force, Open, Out, recorded, run_of
from batchnorm.lab.options import INITS
from batchnorm.progress import bars
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.command import announce
from batchnorm.terminal import note

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.signal import SignalRecipe

FOLDER = Path("batchnorm-watch")


def watch_demo(
    init: Annotated[str, typer.Option(help=f"How weights begin: {', '.join(INITS)}.")] = "lecun",
    rate: Annotated[float, typer.Option(help="The learning rate of both networks.")] = 0.5,
    momentum: Annotated[float, typer.Option(help="The momentum of both networks.")] = 0.9,
    steps: Annotated[int, typer.Option(help="Training steps of both networks.")] = 400,
    every: Annotated[int, typer.Option(help="Record every so many steps; of the first 100, all are recorded.")] = 5,
    activation: Annotated[str, typer.Option(help="The activation of every layer: tanh or sigmoid.")] = "tanh",
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the digits.")] = 0,
    out: Out = FOLDER,
    gif: Annotated[
        Path | None,
        typer.Option(
            help="Also write the film as one animated picture, an SVG below 1 MB that any <img> plays: for a README.",
            metavar="FILE.svg",
        ),
    ] = None,
    open: Open = False,
    force: Force = False,
) -> None:
    """Train four layers of tanh without Batch Normalization and with it, and play what flows through them.

    Both networks begin with the same weights and read the same digits, which ship here, in the same order. The
    page shows the histogram of every layer's input, step by step: how it drifts, saturates, and what BN makes of
    it. The defaults are chosen to show that; try others.

    Examples:

      batchnorm watch-demo --open

      batchnorm watch-demo --rate 0.05

      batchnorm watch-demo --gif film.svg
    """
    check_folder("--out", out)
    if gif is not None:
        check_picture(gif, force)
    from rich.console import Console

    from batchnorm.lab.signal import SignalRecipe, write
    from batchnorm.report.load import Run
    from batchnorm.report.moving import write_film
    from batchnorm.report.page import write_page

    console = Console(highlight=False)
    recipe = SignalRecipe(
        init=init, rate=rate, momentum=momentum, steps=steps, every=every, activation=activation, seed=seed
    )
    records = signal_of(recipe, console, out / SIGNAL, force=force)
    for line in summary_lines(records):
        console.print(line, soft_wrap=True)
    write(records, out / SIGNAL)
    if gif is not None:
        note(f"The picture is {write_film(records, gif)}")
    announce(write_page([Run("signal", records)], out / PAGE), open)


def check_picture(path: Path, force: bool = False) -> None:
    """Raise for a picture that is not an SVG, or cannot be written, before the run.

    >>> check_picture(Path("film.gif"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --gif is film.gif, but the picture is an animated SVG; name it film.svg
    """
    if path.suffix != ".svg":
        raise BatchNormError(
            f"--gif is {path}, but the picture is an animated SVG", do=f"name it {path.with_suffix('.svg')}"
        )
    check_target("--gif", path, force)


def signal_of(recipe: SignalRecipe, console: Console, file: Path | None = None, *, force: bool = False) -> RecordFile:
    """Record the signal on one thread, with a bar on a terminal: the matrices are too small to share.

    >>> signal_of(SignalRecipe(), Console())  # doctest: +SKIP
    """
    from batchnorm.lab import as_runs

    with bars(console=console) as shown:
        task = shown.add_task("The signal", total=2 * (recipe.steps + 1))
        return recorded(
            run_of("watch-demo", recipe),
            as_runs.watch_demo,
            threads=1,
            file=file,
            force=force,
            watch=lambda done: shown.update(task, completed=done),
        )


def summary_lines(records: RecordFile) -> list[str]:
    """Summarize each network: the most saturated layer and step, and the accuracy at the last recorded step.

    >>> from batchnorm.records import Measurement, RecordFile
    >>> flat = Measurement("saturation", {"step": 40, "layer": "layer 4", "stack": "without BN"}, (0.97,))
    >>> read = Measurement("validation accuracy", {"step": 96, "layer": "", "stack": "without BN"}, (0.5,))
    >>> print(*summary_lines(RecordFile("watch", {}, (flat, read))))
    without BN: up to 97% of layer 4 in the flat ends (step 40); reads 50.0% of the digits at step 96
    """
    lines = []
    for stack in dict.fromkeys(str(m.setting["stack"]) for m in records.measurements):
        own = [m for m in records.measurements if m.setting["stack"] == stack and m.samples]
        flat = max((m for m in own if m.quantity == "saturation"), key=lambda m: m.samples[0], default=None)
        read = max((m for m in own if m.quantity == "validation accuracy"), key=_step, default=None)
        words = []
        if flat is not None:
            share, layer = flat.samples[0], flat.setting["layer"]
            words.append(f"up to {share:.0%} of {layer} in the flat ends (step {_step(flat)})")
        if read is not None:
            words.append(f"reads {read.samples[0]:.1%} of the digits at step {_step(read)}")
        lines.append(f"{stack}: {'; '.join(words)}")
    return lines


def _step(measurement: Measurement) -> int:
    return int(measurement.setting["step"])
