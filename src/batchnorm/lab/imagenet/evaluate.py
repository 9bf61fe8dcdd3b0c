"""Evaluation as in the paper's Figure 4: one crop or 144, one network or an ensemble, top-1 and top-5 errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.checkpoints import load_state
from batchnorm.errors import BatchNormError
from batchnorm.lab.data.imagefolder import Index
from batchnorm.lab.imagenet.examples import VIEWS, looks, training_batches
from batchnorm.lab.imagenet.settings import ImageNetSettings, loaded
from batchnorm.lab.imagenet.state import NETWORK, network_of, summed
from batchnorm.lab.imagenet.train import own_device
from batchnorm.lab.runs.ranks import place
from batchnorm.lab.runs.store import CHECKPOINT, Store
from batchnorm.transforms.calibrate import calibrate

TOP = 5


@dataclass(frozen=True)
class Score:
    """How many images a network, or an ensemble, got wrong."""

    name: str
    images: int
    wrong: int  # the class is not the likeliest
    missed: int  # it is not among the five likeliest

    @property
    def top1(self) -> float:
        """The top-1 error.

        >>> Score("a", images=50, wrong=10, missed=2).top1
        0.2
        """
        return self.wrong / self.images

    @property
    def top5(self) -> float:
        """The top-5 error.

        >>> Score("a", images=50, wrong=10, missed=2).top5
        0.04
        """
        return self.missed / self.images


@torch.no_grad()
def probabilities(model: nn.Module, views: Tensor, chunk: int = VIEWS) -> Tensor:
    """Return class probabilities, the mean over the views of each image: (images, classes) of (images, views, 3, h, w).

    >>> model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> probabilities(model, torch.zeros(2, 4, 3, 8, 8))
    tensor([[0.3333, 0.3333, 0.3333],
            [0.3333, 0.3333, 0.3333]], dtype=torch.float64)

    At most ``chunk`` views are scored at once, which bounds the memory.
    """
    parameter = next(model.parameters(), views)
    scores = []
    for part in torch.split(views.flatten(0, 1), chunk):
        images = part.to(parameter.device, parameter.dtype, memory_format=torch.channels_last)
        scores.append(model(images).double().softmax(1).cpu())
    return torch.unflatten(torch.cat(scores), 0, views.shape[:2]).mean(1)


def evaluate(
    models: Sequence[nn.Module],
    views: Iterable[tuple[Tensor, Tensor]],
    *,
    names: Sequence[str] = (),
    progress: Callable[[int], None] = lambda images: None,
) -> list[Score]:
    """Return a score for each model and, of several, one for the ensemble: the mean of their class probabilities.

    >>> first, second, both = evaluate([a, b], looks(index, crops=144))  # doctest: +SKIP

    Under torchrun every process gives its share of the images, and all get the scores of all of them.
    """
    called = [*(names or [f"network {number}" for number in range(1, len(models) + 1)])]
    if len(models) > 1:
        called.append("ensemble")
    counts = torch.zeros(len(called), 2, dtype=torch.float64)
    images = 0
    for looked, labels in views:
        found = [probabilities(model, looked) for model in models]
        if len(models) > 1:
            found.append(torch.stack(found).mean(0))
        for row, each in enumerate(found):
            top = each.topk(min(TOP, each.shape[1]), 1).indices == labels[:, None]
            counts[row] += torch.stack([(~top[:, 0]).sum(), (~top.any(1)).sum()])
        images += len(labels)
        progress(images)
    device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
    counts, total = summed(counts.to(device)).cpu(), int(summed(torch.tensor(images, device=device)))
    if not total:
        raise BatchNormError("there are no images to evaluate on", do="give a folder with validation images")
    return [Score(name, total, *map(int, row)) for name, row in zip(called, counts.tolist(), strict=True)]


def load(
    path: str | Path, options: dict[str, Any] | None = None, classes: int = 0
) -> tuple[nn.Module, ImageNetSettings, int]:
    """Load a network from the folder of a run or from a .safetensors file; return its settings and classes as well.

    >>> load("model.pt")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: model.pt is neither a folder of a run nor a .safetensors file; give one of them

    The folder of a run says by itself what network it holds. A file needs the ``options`` of the run, at least the
    variant. Nothing is unpickled.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        options, file = options_of(path), path / CHECKPOINT
    elif path.suffix == ".safetensors":
        file = path
    else:
        raise BatchNormError(f"{path} is neither a folder of a run nor a .safetensors file", do="give one of them")
    state = load_state(file)
    if any(name.startswith(NETWORK) for name in state):
        state = network_of(state)
    if "classifier.weight" not in state:
        raise BatchNormError(f"{file} holds no Inception of this package", do="give a checkpoint of inception-imagenet")
    found = len(state["classifier.weight"])
    if classes and found != classes:
        raise BatchNormError(
            f"{file} has {found} classes, the folder has {classes}", do="give the folder it was made for"
        )
    settings = ImageNetSettings.of(options or {})
    return loaded(settings, found, state), settings, found


def options_of(folder: Path) -> dict[str, Any]:
    """Return the options of the run in a folder."""
    options = dict(Store(folder.parent).read(folder).run.options)
    if not (folder / CHECKPOINT).exists():
        raise BatchNormError(f"{folder} has no checkpoint yet", do="let it run until it has saved one")
    return options


def evaluate_paths(
    paths: Sequence[str | Path],
    index: Index,
    *,
    crops: int = 1,
    limit: int = 0,
    workers: int = 0,
    statistics: int = 0,
    options: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> list[Score]:
    """Load networks and evaluate them on the validation images of a folder.

    >>> evaluate_paths(["batchnorm-lab/0f3a"], open_folder("imagenet"), crops=144)  # doctest: +SKIP

    ``statistics``: replace the running averages by Algorithm 2's means over so many training batches, as the paper does
    for inference. ``limit``: only so many images. ``options``: of networks that come as files.
    """
    if not paths:
        raise BatchNormError("no network was given", do="name the folders of runs or .safetensors files")
    rank, processes = place()
    device, models, sizes = own_device(), [], set()
    for path in paths:
        model, settings, _ = load(path, options, len(index.classes))
        model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if statistics and settings.of_paper.normalised:
            model = population(model, index, settings, statistics)
        models.append(model)
        sizes.add(settings.size)
    if len(sizes) > 1:
        raise BatchNormError(f"the networks have crops of {sorted(sizes)}", do="evaluate those of one size together")
    views = looks(index, crops=crops, size=sizes.pop(), workers=workers, rank=rank, processes=processes, limit=limit)
    return evaluate(models, views, names=[str(path) for path in paths], progress=progress)


def population(model: nn.Module, index: Index, settings: ImageNetSettings, batches: int) -> nn.Module:
    """Return the model with the population statistics of Algorithm 2, over so many training batches."""
    parameter = next(model.parameters())
    stream = (
        images.to(parameter.device, parameter.dtype, memory_format=torch.channels_last)
        for images, _ in itertools.islice(training_batches(index, settings, first=1), batches)
    )
    calibrated, _ = calibrate(model, stream, formula="paper", progress=False)
    return calibrated.eval()
