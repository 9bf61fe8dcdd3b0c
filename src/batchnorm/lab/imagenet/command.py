"""``batchnorm lab evaluate``: the command itself; torch is imported only when it runs."""

from __future__ import annotations

import contextlib
import json as codec
from pathlib import Path
from typing import Annotated

import typer

from batchnorm.errors import BatchNormError
from batchnorm.files import check_target, write_atomically
from batchnorm.options import Force
from batchnorm.progress import bars
from batchnorm.terminal import say

EXPERIMENT = "inception-imagenet"


def evaluate(
    networks: Annotated[
        list[str], typer.Argument(metavar="NETWORK...", help="Folders of runs, or .safetensors files with --set.")
    ],
    data: Annotated[
        str,
        typer.Option(
            envvar="BATCHNORM_DATA", help="The image folder, with train/CLASS/ and val/CLASS/.", metavar="DIR"
        ),
    ] = "",
    crops: Annotated[int, typer.Option(help="1, or the 144 of Szegedy et al. (2014).")] = 1,
    statistics: Annotated[
        int, typer.Option(help="First take population statistics over so many training batches (Algorithm 2).", min=0)
    ] = 0,
    limit: Annotated[int, typer.Option(help="Only so many images, evenly from all classes; 0 takes all.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode images.", min=0)] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the run that a file comes from.", metavar="NAME=VALUE"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the errors to this file.", metavar="OUT")] = None,
    force: Force = False,
) -> None:
    """Evaluate runs of inception-imagenet: top-1 and top-5 errors of each, and of all of them as an ensemble.

    The paper's Figure 4 has a single crop, 144 crops, and 144 crops of an ensemble of six. An ensemble's prediction is
    the mean of the class probabilities.

    Examples:

      batchnorm lab evaluate batchnorm-lab/3f9a02c1d4e5 --data imagenet/

      batchnorm lab evaluate batchnorm-lab/* --data imagenet/ --crops 144 --statistics 1000

      batchnorm lab evaluate model.safetensors --set variant=bn-x30 --data imagenet/

      torchrun --nproc-per-node 8 -m batchnorm lab evaluate batchnorm-lab/* --crops 144 --data imagenet/
    """
    if json is not None:
        check_target("--json", json, force)

    from batchnorm.lab.imagenet.evaluate import evaluate_paths
    from batchnorm.lab.imagenet.examples import open_folder
    from batchnorm.lab.runs import ranks
    from batchnorm.lab.runs.experiments import runs_of

    asked = runs_of(EXPERIMENT, settings or [])
    if len(asked) > 1:
        raise BatchNormError("--set has several values for an option", do="give the one that the file was trained with")
    index = open_folder(data)
    with ranks.joined() if ranks.asked() else contextlib.nullcontext():
        rank, processes = ranks.place()
        with bars(wanted=False if rank else None) as bar:
            task = bar.add_task("images", total=(limit or len(index.val)) / processes)
            scores = evaluate_paths(
                networks,
                index,
                crops=crops,
                limit=limit,
                workers=workers,
                statistics=statistics,
                options=dict(asked[0].options),
                progress=lambda images: bar.update(task, completed=images),
            )
    if rank:
        return
    for score in scores:
        say(f"{score.name}: top-1 error {score.top1:.2%}, top-5 error {score.top5:.2%}")
    say(f"{scores[0].images:,} images, {crops} crop{'s' * (crops > 1)}.")
    if json is not None:
        about = {"crops": crops, "images": scores[0].images, "statistics": statistics, "checksum": index.checksum}
        found = [{"name": s.name, "top1_error": s.top1, "top5_error": s.top5} for s in scores]
        write_atomically(json, codec.dumps({**about, "scores": found}, indent=1) + "\n")
