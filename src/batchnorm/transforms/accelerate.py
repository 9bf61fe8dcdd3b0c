"""``accelerate``: one line before training on a CPU; it measures what it says."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from batchnorm.graph import call_with
from batchnorm.preserve import random_states
from batchnorm.records import Change, Measurement, Report
from batchnorm.transforms.follow import Optimizers, check_changeable, follow, several
from batchnorm.transforms.fuse import fuse
from batchnorm.transforms.verify import Forward, check_arguments

Loss = Callable[[Any], Tensor]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_WORTH = 1.02  # a layout that gains less than this is not worth a change
_MOST = 51  # steps of each way, however quick they are


@dataclass(frozen=True)
class Acceleration(Report):
    """A report with the measured times of a training step: the model as it was, and each way that was tried.

    >>> seconds = {"as it was": 3.0, "fused": 2.0}
    >>> was, now = (Measurement("time", {"contender": n}, (t,) * 3, "s") for n, t in seconds.items())
    >>> print(Acceleration(times=(was, now), chosen="fused"))
    no modules changed
    a training step: 3 s as it was, 2 s now (fused): 1.50x faster (1.50 to 1.50, 3 steps each)
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
        if self.times:
            ratios = self.speedups
            times = {str(m.setting["contender"]): m.median for m in self.times}
            lines.append(
                f"a training step: {times['as it was']:.3g} s as it was, {times[self.chosen]:.3g} s now "
                f"({self.chosen}): {ratios.median:.2f}x faster ({ratios.quantile(0.25):.2f} to "
                f"{ratios.quantile(0.75):.2f}, {len(ratios.samples)} steps each)"
            )
        return "\n".join(lines)


def accelerate(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizers = None,
    forward: Forward | None = None,
    tolerance: float | None = None,
    steps: int = 7,
    seconds: float = 10.0,
) -> tuple[nn.Module, Acceleration]:
    """Return a copy that trains faster on this CPU, and by how much: fused, in the memory layout that is faster here.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    >>> faster, report = accelerate(model, torch.randn(4, 3, 16, 16), steps=2, seconds=0)
    >>> report.speedup > 0 and report.chosen in ("as it was", "fused", "fused, channels_last", "fused, contiguous")
    True

    What `batchnorm.fuse` does is done first. Then training steps (forward, backward, SGD) of copies are timed with the
    example, in turn: the model as it was, fused, and fused in the other memory layout if it has convolutions. The
    fastest is returned, and that may be the model as it was; the report has all the times. The weights carry the
    layout, so inputs need not be converted.

    ``loss`` maps the model's output to a scalar (default: the mean square of all that it returns). ``steps`` of each
    are timed, and more while ``seconds`` are not over: a machine that others use, too, needs many. What counts is the
    median ratio of neighbouring steps. Optimisers that are given go over to the copy, with groups and state. Give an
    example of the size that you train with: what is faster depends on it.
    """
    check_arguments(model, forward, tolerance, "accelerate")
    check_changeable(model, "accelerate")
    optimizers = several(optimizer, model, "accelerate")
    fused, report = fuse(model, example, forward=forward, tolerance=tolerance)
    ways: dict[str, nn.Module] = {"as it was": model, "fused": fused}
    other = _other_layout(fused)
    if other is not None:
        ways[f"fused, {other}"] = in_layout(copy.deepcopy(fused), other)
    run = forward or call_with
    goal = loss or mean_square
    times = measure({name: _steps(way, example, run, goal) for name, way in ways.items()}, steps, seconds=seconds)
    chosen = max(ways, key=lambda name: _gain(times, name) / (1.0 if name == "fused" else _WORTH))
    changed = ways[chosen]
    changes, left = report.changes, dict(report.left)
    if chosen == "as it was":
        changed = copy.deepcopy(model)
        changes, left = (), {"": "it is as fast as it was fused, with this example on this machine"}
    elif chosen != "fused" and other is not None:
        changes = (*changes, Change("", "memory layout", _layout(fused), other))
    follow(optimizers, model, changed)
    if chosen not in ("as it was", "fused") and other is not None:
        for each in optimizers:  # momentum in another layout than its weight would be converted at every step
            for state in each.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() in _FORMATS:
                        state[name] = value.contiguous(memory_format=_format(value, other))
    return changed, Acceleration(changes, left, report.certificate, report.gradients, times, chosen)


def _gain(times: tuple[Measurement, ...], name: str) -> float:
    """How many times faster than the model as it was a way is."""
    return Acceleration(times=times, chosen=name).speedup


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
        begun = time.perf_counter()
        for index in range(warm_up + max(steps, _MOST)):
            if index >= warm_up + steps and time.perf_counter() - begun > seconds:
                break
            for name, function in contenders.items():
                began = time.perf_counter()
                function()
                if index >= warm_up:
                    samples[name].append(time.perf_counter() - began)
    return tuple(Measurement("time", {"contender": name}, tuple(found), "s") for name, found in samples.items())


def mean_square(output: Any) -> Tensor:
    """Return the mean square of all numbers of an output: a loss for when any will do.

    >>> mean_square({"a": torch.tensor([1.0, 3.0])})
    tensor(5.)
    """
    parts = [t.float().square().mean() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack(parts).sum()


def _steps(model: nn.Module, example: Any, run: Forward, loss: Loss) -> Callable[[], None]:
    """A training step of a copy, on a copy of the example."""
    twin = copy.deepcopy(model).train()
    learning = [p for p in twin.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(learning, lr=1e-6, momentum=0.9) if learning else None
    given = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, example)

    def step() -> None:
        with torch.enable_grad():
            if sgd is not None:
                sgd.zero_grad()
            found = loss(run(twin, given))
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
