"""The table of commands. Torch is imported only inside the ones that use it."""

from __future__ import annotations

from typing import Annotated

import typer

from batchnorm import __version__
from batchnorm.bench.command import bench
from batchnorm.doctor.command import check
from batchnorm.doctor.explain import explain, rules
from batchnorm.lab.command import race
from batchnorm.lab.data.command import data
from batchnorm.lab.demo import watch_demo
from batchnorm.lab.figure1.command import figure1
from batchnorm.lab.imagenet.command import evaluate
from batchnorm.lab.judge.command import claims
from batchnorm.lab.judge.command import report as claims_page
from batchnorm.lab.landscape.command import landscape
from batchnorm.lab.runs.command import lab
from batchnorm.report.command import report
from batchnorm.terminal import with_levels
from batchnorm.transforms.command import calibrate, fold

app = typer.Typer(
    name="batchnorm",
    help="Batch Normalization for PyTorch: see what it buys, check and transform networks with it, make it fast.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (race, watch_demo, figure1, landscape, claims, report, check, explain, rules, calibrate, fold, bench):
    app.command()(command)
lab.command(name="report")(claims_page)
lab.command()(evaluate)
lab.command(name="data")(data)
app.add_typer(lab)
for group in (app, lab):
    for info in group.registered_commands:
        assert info.callback is not None
        info.callback = with_levels(info.callback)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"batchnorm {__version__}")
        raise typer.Exit


@lab.callback()
@with_levels
def of_lab() -> None:
    """What can be given in front of a command of the lab; its help is the one of the group."""


@app.callback()
@with_levels
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_say_version, is_eager=True, help="Say which version this is, and end."
        ),
    ] = False,
) -> None:
    """What can be given in front of a command; without help of its own, so that the one above is shown."""
