"""``accelerate``: one line before training or inference on a CPU; it measures what it reports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with, in_training
from batchnorm.errors import BatchNormError
from batchnorm.nested import fresh, tensors_in
from batchnorm.optim import Optimizers
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Certificate, Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.fold import fold
from batchnorm.transforms.follow import check_changeable, check_optimizers, copy_model, follow
from batchnorm.transforms.fuse import fuse
from batchnorm.transforms.gradients import verify_gradients
from batchnorm.transforms.layout import format_of, in_layout, layout_of, other_layout
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.stages import in_stages, stage
from batchnorm.transforms.timing import WAS, Acceleration, fastest, measure
from batchnorm.transforms.verify import check_arguments, verify

Loss = Callable[[Any], Tensor]
_FUSED, _FOLDED = "fused", "folded"
_NO_GAIN = Report(left={"": "with this example on this machine, nothing that was tried is reliably faster"})


@in_stages
def accelerate(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizers = None,
    forward: Forward | None = None,
    tolerance: float | None = None,
    steps: int = 11,
    seconds: float = 10.0,
    compile: bool = False,
    progress: bool | None = None,
) -> tuple[nn.Module, Acceleration]:
    """Return a faster copy for this CPU and a report of the speedup: for training or, in evaluation mode, inference.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    >>> faster, report = accelerate(model, torch.randn(4, 3, 16, 16), steps=2, seconds=0)
    >>> [time.setting["contender"] for time in report.times]
    ['as it was', 'fused', 'channels_last', 'fused, channels_last']
    >>> report.chosen  # two steps show nothing
    'as it was'
    >>> faster, report = accelerate(model.eval(), torch.randn(4, 3, 16, 16), steps=2, seconds=0)
    >>> [time.setting["contender"] for time in report.times]
    ['as it was', 'folded', 'folded, channels_last']

    **Training.** `batchnorm.fuse` makes a fused copy. Then training steps (forward, backward, SGD) of copies are timed
    with the example: the model as it was, fused, and if it has convolutions, both in the other memory layout. ``loss``
    maps the model's output to a scalar (default: the mean square of all outputs). Optimizers that are given
    move to the copy, with groups and state.

    **Inference**, for a model in evaluation mode. `batchnorm.fold` makes an inference network, and our layers
    replace BN layers that cannot be folded. Forward passes without gradients are timed: the model as it was, folded,
    and folded in the other memory layout; with ``compile=True`` also each of the folded ones after ``torch.compile``.

    The variants run in turns, and each run is compared with the neighbouring run of the original model. A variant
    counts as faster if three quarters of its runs were, and more than chance explains (a sign test at 2 %, shared by
    the variants). The one with the largest median ratio is returned; if none is faster beyond noise, a copy of the
    original model. The weights carry the layout, so inputs need not be converted. The report has all times, and the
    certificates of the returned model.

    At least ``steps`` of each are timed, and more until ``seconds`` have passed; fewer than eight show nothing. Give an
    example of the size that you use, because the fastest variant depends on it. ``progress``: after two seconds a line
    on stderr says what is being measured; by default, on a terminal.
    """
    check_arguments(model, forward, tolerance, "accelerate")
    check_changeable(model, "accelerate")
    if model.training:
        _refuse_if(compile, "compile=True is for inference; the model is in training mode", "call model.eval() first")
        optimizers = check_optimizers(model, optimizer, "accelerate")
        return Changed(
            _for_training(model, example, optimizers, forward, tolerance, steps, seconds, loss or mean_square)
        )
    for name, given in (("loss", loss), ("optimizer", optimizer)):
        words = f"{name}= is for training; the model is in evaluation mode"
        _refuse_if(given is not None, words, "call model.train() first")
    return Changed(_for_inference(model, example, forward, tolerance, steps, seconds, compile))


def _refuse_if(wrong: bool, words: str, do: str) -> None:
    if wrong:
        raise BatchNormError(words, where="accelerate", do=do)


def _for_training(
    model: nn.Module,
    example: Any,
    optimizers: tuple[torch.optim.Optimizer, ...],
    forward: Forward | None,
    tolerance: float | None,
    steps: int,
    seconds: float,
    loss: Loss,
) -> tuple[nn.Module, Acceleration]:
    """Time training steps; the optimizers follow the model that is returned."""
    fused, report = fuse(model, example, forward=forward, tolerance=tolerance)
    ways: dict[str, nn.Module] = {WAS: model, _FUSED: fused}
    other = other_layout(model)
    if other is not None:
        ways[other] = in_layout(copy_model(model), other)
        ways[f"{_FUSED}, {other}"] = in_layout(copy.deepcopy(fused), other)
    run = forward or call_with
    times = measure({name: _steps(way, example, run, loss) for name, way in ways.items()}, steps, seconds=seconds)
    chosen = fastest(times)
    changed = ways[chosen]
    if chosen == WAS:
        changed, report = copy_model(model), _NO_GAIN
    elif chosen != _FUSED and other is not None:
        layout = Change("", "memory layout", layout_of(model), other)
        report = replace(report, changes=(*(report.changes if chosen != other else ()), layout))
        twin = in_layout(copy_model(model), other)
        outputs, gradients = _certificates(model, changed, twin, example, forward, tolerance)
        report = replace(report, certificate=outputs, gradients=gradients)
    follow(optimizers, model, changed)
    if chosen not in (WAS, _FUSED) and other is not None:
        for each in optimizers:  # momentum in another layout than its weight would be converted at every step
            for state in each.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() in (4, 5):
                        state[name] = value.contiguous(memory_format=format_of(value, other))
    left_behind(model, changed, "accelerate")
    return changed, Acceleration(report.changes, report.left, report.certificate, report.gradients, times, chosen)


def _for_inference(
    model: nn.Module,
    example: Any,
    forward: Forward | None,
    tolerance: float | None,
    steps: int,
    seconds: float,
    compiled: bool,
) -> tuple[nn.Module, Acceleration]:
    """Time forward passes of the folded model in both layouts, eager and, if asked for, compiled."""
    folded, report = fold(model, example, forward=forward, tolerance=tolerance)
    if report.left:  # our layers are faster than torch's, and take in what follows them
        folded, fused = fuse(folded, example, forward=forward, tolerance=tolerance)
        report = replace(report, changes=(*report.changes, *fused.changes))
    ways: dict[str, nn.Module] = {WAS: copy_model(model), _FOLDED: folded}
    other = other_layout(model)
    if other is not None:
        ways[f"{_FOLDED}, {other}"] = in_layout(copy.deepcopy(folded), other)
    if compiled:
        for name in [*ways][1:]:
            # Not Module.compile(): of a Sequential it compiles nothing, silently.
            ways[f"{name}, compiled"] = cast(nn.Module, torch.compile(copy.deepcopy(ways[name])))
    run = forward or call_with
    with ExitStack() as stack:
        for way in ways.values():
            stack.enter_context(untouched(way))
        times = measure({name: _passes(way, example, run) for name, way in ways.items()}, steps, seconds=seconds)
    chosen = fastest(times)
    changed = ways[chosen]
    if chosen == WAS:
        report = _NO_GAIN
    else:
        if other is not None and other in chosen:
            report = replace(report, changes=(*report.changes, Change("", "memory layout", layout_of(model), other)))
        if "compiled" in chosen:
            report = replace(report, changes=(*report.changes, Change("", "torch.compile", "eager", "compiled")))
        stage("comparing outputs")
        certificate = verify(model, changed, example, verb="accelerate", forward=forward, tolerance=tolerance)
        report = replace(report, certificate=certificate)
    left_behind(model, changed, "accelerate", trains=False)
    return changed, Acceleration(
        report.changes, report.left, report.certificate, None, times, chosen, timed="an inference"
    )


def _certificates(
    model: nn.Module,
    changed: nn.Module,
    twin: nn.Module,
    example: Any,
    forward: Forward | None,
    tolerance: float | None,
) -> tuple[Certificate, Certificate | None]:
    """Compare outputs and gradients. ``twin`` is the original model in the memory layout of the changed one."""
    before = copy_model(model)
    with untouched(changed):
        outputs = verify(
            in_mode(before, False),
            in_mode(changed, False),
            example,
            verb="accelerate",
            forward=forward,
            tolerance=tolerance,
        )
    return outputs, verify_gradients(
        copy_model(model), changed, example, verb="accelerate", forward=forward, tolerance=tolerance, twin=twin
    )


def mean_square(output: Any) -> Tensor:
    """Return the mean square of an output: a stand-in for a loss.

    >>> mean_square({"a": torch.tensor([1.0, 3.0])})
    tensor(5.)
    """
    parts = [t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack(parts).sum()


def _passes(model: nn.Module, example: Any, run: Forward) -> Callable[[], None]:
    """Return a forward pass without gradients, on a copy of the example."""
    given = fresh(example)

    def infer() -> None:
        with torch.no_grad():
            run(model, given)

    return infer


def _steps(model: nn.Module, example: Any, run: Forward, loss: Loss) -> Callable[[], None]:
    """Return a training step of a copy, on a copy of the example."""
    twin = in_mode(copy_model(model), True)
    learning = [p for p in twin.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(learning, lr=1e-6, momentum=0.9) if learning else None
    given = fresh(example)

    def step() -> None:
        with torch.enable_grad():
            if sgd is not None:
                sgd.zero_grad()
            found = loss(in_training(twin, given, run, "accelerate"))
            if found.requires_grad:
                found.backward()  # type: ignore[no-untyped-call]
            if sgd is not None:
                sgd.step()

    return step
