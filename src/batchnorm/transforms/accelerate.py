"""``accelerate``: one line before training on a CPU; it measures what it says."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with, in_training
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import in_mode, random_states, untouched
from batchnorm.records import Certificate, Change, Measurement, Report
from batchnorm.transforms.follow import Optimizers, check_changeable, copy_model, follow, several
from batchnorm.transforms.fuse import fuse
from batchnorm.transforms.gradients import verify_gradients
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.verify import check_arguments, verify

Loss = Callable[[Any], Tensor]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_WORTH = 1.02  # another layout that gains less than this over the same one is not worth a change
_MOST = 51  # steps of each way, however quick they are
_CHANCE = 0.02  # how probable it may be that a way that is no faster looks as if it were
_WAS, _FUSED = "as it was", "fused"
clock = time.perf_counter  # a name of its own, so that a test can have another


@dataclass(frozen=True)
class Acceleration(Report):
    """A report with the measured times of a training step: the model as it was, and each way that was tried.

    >>> seconds = {"as it was": 3.0, "fused": 2.0}
    >>> was, now = (Measurement("time", {"contender": n}, (t,) * 3, "s") for n, t in seconds.items())
    >>> print(Acceleration(times=(was, now), chosen="fused"))
    no modules changed
    a training step: 3 s as it was, 2 s now (fused: 1.50 times as fast, 1.50 to 1.50 in the middle half of 3 steps)
    """

    times: tuple[Measurement, ...] = ()
    chosen: str = ""

    @property
    def speedups(self) -> Measurement:
        """The ratio of every pair of steps, taken in turn: the model as it was to the one returned.

        >>> was, now = (Measurement("time", {"contender": n}, (t,), "s") for n, t in (("as it was", 3.0), ("x", 2.0)))
        >>> Acceleration(times=(was, now), chosen="x").speedups.samples
        (1.5,)
        """
        by_name = {str(m.setting["contender"]): m.samples for m in self.times}
        old, new = by_name["as it was"], by_name[self.chosen]
        return Measurement("speed-up", {"contender": self.chosen}, tuple(a / b for a, b in zip(old, new, strict=True)))

    @property
    def speedup(self) -> float:
        """The median of `speedups`.

        >>> was, now = (Measurement("time", {"contender": n}, (t,), "s") for n, t in (("as it was", 3.0), ("x", 2.0)))
        >>> Acceleration(times=(was, now), chosen="x").speedup
        1.5
        """
        return self.speedups.median

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.times and self.chosen == _WAS:
            lines.append(
                f"a training step takes {self.times[0].median:.3g} s, and nothing that was tried is surely faster"
            )
            for ratios in (replace(self, chosen=str(m.setting["contender"])).speedups for m in self.times[1:]):
                lines.append(f"  {_told(ratios)}")
        elif self.times:
            ratios = self.speedups
            times = {str(m.setting["contender"]): m.median for m in self.times}
            lines.append(
                f"a training step: {times['as it was']:.3g} s as it was, {times[self.chosen]:.3g} s now "
                f"({_told(ratios)})"
            )
        return "\n".join(lines)


def _told(ratios: Measurement) -> str:
    return (
        f"{ratios.setting['contender']}: {ratios.median:.2f} times as fast, {ratios.quantile(0.25):.2f} to "
        f"{ratios.quantile(0.75):.2f} in the middle half of {len(ratios.samples)} steps"
    )


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
) -> tuple[nn.Module, Acceleration]:
    """Return a copy that trains faster on this CPU, and by how much: fused, in the memory layout that is faster here.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    >>> faster, report = accelerate(model, torch.randn(4, 3, 16, 16), steps=2, seconds=0)
    >>> [time.setting["contender"] for time in report.times]
    ['as it was', 'fused', 'channels_last', 'fused, channels_last']
    >>> report.chosen  # two steps show nothing
    'as it was'

    What `batchnorm.fuse` does is done first. Then training steps (forward, backward, SGD) of copies are timed with the
    example, in turn: the model as it was, fused, and if it has convolutions, both in the other memory layout. The
    weights carry the layout, so inputs need not be converted. Each step is compared with the neighbouring one of the
    model as it was. A way counts as faster if three quarters of its steps were, and more of them than chance explains
    (a sign test at 2 %, shared by the ways): so noise does not make anybody's model slower. Of those that do, the one
    with the largest median ratio is returned; if none does, a copy of the model as it was. The report has all the
    times.

    ``loss`` maps the model's output to a scalar (default: the mean square of all that it returns). ``steps`` of each
    are timed, and more while ``seconds`` are not over: a machine that others use, too, needs many, and fewer than eight
    show nothing. Optimisers that are given go over to the copy, with groups and state. Give an example of the size
    that you train with: what is faster depends on it. The certificates are those of the model that is returned.
    """
    check_arguments(model, forward, tolerance, "accelerate")
    check_changeable(model, "accelerate")
    optimizers = several(optimizer, model, "accelerate")
    fused, report = fuse(model, example, forward=forward, tolerance=tolerance)
    ways: dict[str, nn.Module] = {_WAS: model, _FUSED: fused}
    other = _other_layout(model)
    if other is not None:
        ways[other] = in_layout(copy_model(model), other)
        ways[f"{_FUSED}, {other}"] = in_layout(copy.deepcopy(fused), other)
    run = forward or call_with
    goal = loss or mean_square
    times = measure({name: _steps(way, example, run, goal) for name, way in ways.items()}, steps, seconds=seconds)
    chosen = fastest(times)
    changed = ways[chosen]
    if chosen == _WAS:
        changed = copy_model(model)
        why = "with this example on this machine, nothing that was tried is surely faster"
        report = replace(report, changes=(), left={"": why}, certificate=None, gradients=None)
    elif chosen != _FUSED and other is not None:
        layout = Change("", "memory layout", _layout(model), other)
        report = replace(report, changes=(*(report.changes if chosen != other else ()), layout))
        outputs, gradients = _certificates(model, changed, example, forward, tolerance)
        report = replace(report, certificate=outputs, gradients=gradients)
    follow(optimizers, model, changed)
    if chosen not in (_WAS, _FUSED) and other is not None:
        for each in optimizers:  # momentum in another layout than its weight would be converted at every step
            for state in each.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() in _FORMATS:
                        state[name] = value.contiguous(memory_format=_format(value, other))
    left_behind(model, changed, "accelerate")
    return changed, Acceleration(report.changes, report.left, report.certificate, report.gradients, times, chosen)


def fastest(times: tuple[Measurement, ...]) -> str:
    """Return the name of the way that is fastest beyond doubt; that of the first, the model as it was, if none is.

    >>> def times(fused):
    ...     named = {"as it was": (2.0,) * 9, "fused": fused}
    ...     return tuple(Measurement("time", {"contender": name}, found, "s") for name, found in named.items())
    >>> fastest(times((1.0,) * 9)), fastest(times((0.5,) * 6 + (2.1,) * 3))
    ('fused', 'as it was')
    """
    names = [str(m.setting["contender"]) for m in times]
    gains: dict[str, float] = {}
    for name in names[1:]:
        ratios = Acceleration(times=times, chosen=name).speedups
        wins, steps = sum(ratio > 1 for ratio in ratios.samples), len(ratios.samples)
        by_chance = sum(math.comb(steps, k) for k in range(wins, steps + 1)) / 2**steps
        if ratios.quantile(0.25) > 1 and by_chance * (len(names) - 1) <= _CHANCE:
            gains[name] = ratios.median / (1.0 if name == _FUSED else _WORTH)
    return max(gains, key=gains.__getitem__) if gains else names[0]


def _certificates(
    model: nn.Module, changed: nn.Module, example: Any, forward: Forward | None, tolerance: float | None
) -> tuple[Certificate, Certificate | None]:
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
        copy_model(model), changed, example, verb="accelerate", forward=forward, tolerance=tolerance
    )


def measure(
    contenders: dict[str, Callable[[], None]], steps: int, warm_up: int = 2, seconds: float = 0.0
) -> tuple[Measurement, ...]:
    """Time some functions in turn, so that whatever else the machine does meets all of them.

    Each runs ``steps`` times, and more while ``seconds`` are not over, up to `_MOST`.

    >>> [m.setting["contender"] for m in measure({"a": lambda: None, "b": lambda: None}, steps=2)]
    ['a', 'b']
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with random_states():
        begun = clock()
        for index in range(warm_up + max(steps, _MOST)):
            if index >= warm_up + steps and clock() - begun > seconds:
                break
            # In turns, so that no one always runs after the same other, in what that one left in the caches.
            first = index % len(contenders)
            for name in [*contenders][first:] + [*contenders][:first]:
                began = clock()
                contenders[name]()
                if index >= warm_up:
                    samples[name].append(clock() - began)
    return tuple(Measurement("time", {"contender": name}, tuple(found), "s") for name, found in samples.items())


def mean_square(output: Any) -> Tensor:
    """Return the mean square of all numbers of an output: a loss for when any will do.

    >>> mean_square({"a": torch.tensor([1.0, 3.0])})
    tensor(5.)
    """
    parts = [t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack(parts).sum()


def _steps(model: nn.Module, example: Any, run: Forward, loss: Loss) -> Callable[[], None]:
    """A training step of a copy, on a copy of the example."""
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


def _layout(model: nn.Module) -> str | None:
    """In which layout a model's convolutions have their weights; None if it has none that could have another."""
    weights = [p for p in model.parameters() if p.dim() in _FORMATS and p.shape[1] > 1 and max(p.shape[2:]) > 1]
    if not weights:
        return None
    last = sum(w.is_contiguous(memory_format=_FORMATS[w.dim()]) for w in weights)
    return "channels_last" if 2 * last > len(weights) else "contiguous"


def _other_layout(model: nn.Module) -> str | None:
    return {"channels_last": "contiguous", "contiguous": "channels_last"}.get(_layout(model) or "")


def in_layout(model: nn.Module, layout: str) -> nn.Module:
    """Give a model's weights a memory layout, in place: each parameter stays the object that it was.

    >>> model = in_layout(nn.Conv2d(4, 8, 3), "channels_last")
    >>> model.weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() in _FORMATS:
                tensor.data = tensor.data.contiguous(memory_format=_format(tensor, layout))
    return model


def _format(tensor: Tensor, layout: str) -> torch.memory_format:
    return _FORMATS[tensor.dim()] if layout == "channels_last" else torch.contiguous_format
