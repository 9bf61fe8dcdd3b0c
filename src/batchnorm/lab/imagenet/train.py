"""The experiment: train a variant of the paper on an image folder, in one process or under torchrun.

SGD with momentum, an exponential rate, a single-crop validation every so many steps. Without ``sync`` every process
normalises its own share of the batch, as the paper's workers did, and DistributedDataParallel averages the gradients.
The paper's workers sent gradients asynchronously (Dean et al. 2012); these are in step.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchnorm.errors import BatchNormError
from batchnorm.lab.data.imagefolder import Index
from batchnorm.lab.imagenet.examples import looks, open_folder, training_batches
from batchnorm.lab.imagenet.settings import OPTIONS, PRECISIONS, ImageNetSettings
from batchnorm.lab.imagenet.state import averaged, put_back, summed, tensors_of
from batchnorm.lab.imagenet.variants import MOMENTUM, TARGET
from batchnorm.lab.runs.ranks import place
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.optim import param_groups
from batchnorm.records import typed, values_of

SIDE = 0.3  # weight of a side classifier's loss (Szegedy et al. 2014)
DIGITS = 8  # of what is recorded
FACTS = {"checksum": str, "processes": int, "classes": int, "history": list, "diverged": int}  # of a checkpoint

__all__ = ["OPTIONS", "check", "run"]


@dataclass
class Course:
    """How a run went so far; it is kept in the facts of a checkpoint."""

    history: list[list[float]]  # step and validation accuracy
    diverged: int = 0  # the step at which the loss was not finite

    def result(self, target: float = TARGET) -> dict[str, Any]:
        """Return the accuracy at the end, the best one, and the steps to the target; None where there is none.

        >>> Course([[10, 0.5], [20, 0.74], [30, 0.73]]).result()["steps_to_target"]
        20
        """
        best = max(self.history, key=lambda entry: entry[1], default=(0, 0.0))
        return {
            "accuracy": self.history[-1][1] if self.history else None,
            "best_accuracy": best[1] if self.history else None,
            "best_step": int(best[0]) if self.history else None,
            "target": target,
            "steps_to_target": next((int(step) for step, value in self.history if value >= target), None),
            "diverged_at": self.diverged or None,
            "headline": f"diverged at step {self.diverged:,}" if self.diverged else f"best accuracy {best[1]:.1%}",
        }


def check(options: Mapping[str, Any]) -> None:
    """Raise for options that cannot be run.

    >>> check({"steps": -1})
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: steps is -1; give a whole number from 0 up
    """
    ImageNetSettings.of(options)


def run(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train a variant and return how accurate it became.

    >>> run({"variant": "bn-x5", "data": "imagenet", "steps": 1000}, recorder)  # doctest: +SKIP
    """
    settings = ImageNetSettings.of(options)
    index = open_folder(settings.data)
    device = own_device()
    processes = place()[1]
    if settings.batch % processes:
        raise BatchNormError(
            f"a batch of {settings.batch} cannot be shared equally by {processes} processes",
            do=f"set batch to a multiple of {processes}",
        )
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model = settings.network(len(index.classes)).to(device, PRECISIONS[settings.precision])
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(param_groups(model, settings.chosen("l2")), lr=0.0, momentum=MOMENTUM)
        start, course = resume(recorder, settings, index, model, optimizer)
        whole = parallel(model, devices) if processes > 1 else model
        if start < settings.total and not course.diverged:
            train(whole, model, optimizer, settings, index, recorder, start, course)
    size = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    return {**course.result(), **size, "images": len(index.train), "checksum": index.checksum}


def parallel(model: nn.Module, devices: list[int]) -> nn.Module:
    """Average the gradients of all processes; their running statistics stay their own."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates the argument; the new one would send the first process's buffers to all at the start.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(model, device_ids=devices or None, broadcast_buffers=False)


def own_device() -> torch.device:
    """Return the device of this process: its own GPU if there are some, else the CPU.

    >>> own_device().type in ("cpu", "cuda")
    True
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def resume(
    recorder: Recorder, settings: ImageNetSettings, index: Index, model: nn.Module, optimizer: torch.optim.SGD
) -> tuple[int, Course]:
    """Put the last checkpoint back; return after which step it was made, and the course up to there."""
    saved = recorder.restored()
    if saved is None:
        return 0, Course([])
    with values_of("its checkpoint", "delete the run"):
        typed(dict(saved.facts), FACTS, "it", FACTS)
    if saved.facts["checksum"] != index.checksum:
        raise BatchNormError(
            f"the images in {index.root} are not those that this run began with", do="give it the folder as it was"
        )
    before, processes = saved.facts["processes"], place()[1]
    if before != processes and settings.of_paper.normalised and not settings.sync:
        raise BatchNormError(
            f"the run began with {before} processes, each with statistics of its own, and goes on with {processes}",
            do=f"start {before}, or set sync=yes from the start",
        )
    put_back(model, optimizer, saved.tensors)
    return saved.step, Course(saved.facts["history"], saved.facts["diverged"])


def train(
    whole: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.SGD,
    settings: ImageNetSettings,
    index: Index,
    recorder: Recorder,
    start: int,
    course: Course,
) -> None:
    """Train from a step on; ``whole`` is the model as it is called, over all processes."""
    rank, processes = place()
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    batches = training_batches(index, settings, start + 1, rank=rank, processes=processes)
    clock = time.perf_counter()
    whole.train()
    for step, (images, labels) in enumerate(batches, start=start + 1):
        rate = settings.rate_at(step - 1, len(index.train))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if settings.chosen("dropout"):
            torch.manual_seed(((settings.seed * 2**32 + step) * processes + rank) % 2**63)
        images = images.to(device, dtype, memory_format=torch.channels_last, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
            loss = loss_of(whole(images), labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % settings.log_every == 0 or step == settings.total:
            mean = float(summed(loss.detach().double())) / processes
            now = time.perf_counter()
            recorder.log(step, loss=_rounded(mean), rate=_rounded(rate), seconds=round(now - clock, 3))
            clock = now
            course.diverged = 0 if math.isfinite(mean) else step
        if step % settings.validate_every == 0 or step == settings.total:
            accuracy, mean = validate(model, settings, index)
            course.history.append([step, accuracy])
            recorder.log(step, accuracy=accuracy, validation_loss=_rounded(mean))
        last = step == settings.total or bool(course.diverged)
        if ended(recorder, settings, step, last, model, optimizer, course, index) or last:
            return


def loss_of(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy, with that of a side classifier if there is one.

    >>> scores = torch.zeros(2, 4)
    >>> round(loss_of((scores, scores), torch.tensor([0, 1])).item() / math.log(4), 6)
    1.3
    """
    if isinstance(output, tuple):
        return F.cross_entropy(output[0], labels) + SIDE * F.cross_entropy(output[1], labels)
    return F.cross_entropy(output, labels)


def ended(
    recorder: Recorder,
    settings: ImageNetSettings,
    step: int,
    last: bool,
    model: nn.Module,
    optimizer: torch.optim.SGD,
    course: Course,
    index: Index,
) -> bool:
    """Report progress and save a checkpoint when one is due, on all processes together; True if the first one left."""
    device, failure = next(model.parameters()).device, None
    best = max((accuracy for _, accuracy in course.history), default=0.0)
    note = f"best accuracy {best:.1%}" if course.history else ""

    def agreed(mine: bool) -> bool:
        return bool(summed(torch.tensor(float(mine), device=device)))

    try:
        recorder.progress(step, settings.total, note)
    except BaseException as error:  # also a request to stop, which the other processes do not see
        failure = error
    left = agreed(failure is not None)
    if not left and agreed(last or recorder.due()):
        tensors = tensors_of(model, optimizer)
        facts = {"processes": place()[1], "checksum": index.checksum, "classes": len(index.classes)}
        try:
            recorder.save(step, tensors, history=course.history, diverged=course.diverged, **facts)
        except BaseException as error:
            failure = error
        left = agreed(failure is not None)
    if failure is not None:
        raise failure
    return left


@torch.no_grad()
def validate(model: nn.Module, settings: ImageNetSettings, index: Index) -> tuple[float, float]:
    """Return the single-crop accuracy and the mean loss on the validation images, which the processes share."""
    rank, processes = place()
    views = looks(index, size=settings.size, workers=settings.workers, rank=rank, processes=processes)
    model.eval()
    with averaged(model):
        found = counted(model, views)
    model.train()
    right, loss = (summed(found.to(next(model.parameters()).device)) / len(index.val)).tolist()
    return right, loss


def counted(model: nn.Module, views: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return how many images are classified right by their single view, and the sum of their losses."""
    parameter, found = next(model.parameters()), torch.zeros(2, dtype=torch.float64)
    for images, labels in views:
        images = images[:, 0].to(parameter.device, parameter.dtype, memory_format=torch.channels_last)
        scores = model(images).double().cpu()
        right = (scores.argmax(1) == labels).sum()
        found += torch.stack([right.double(), F.cross_entropy(scores, labels, reduction="sum")])
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
