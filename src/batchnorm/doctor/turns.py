"""Steps in which a model is called several times: how often, and whether the calls see the same kind of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.watcher import Pass, TrainingRun

TURNS = 12  # steps in a row that are compared
LAYERS = 8  # at most; the first of every part of the model
NEEDED = TURNS + 1  # steps: the first shows that there are several calls
REST = 10  # after looking in vain, so many times `every` steps go by


@dataclass
class Turn:
    """One layer's inputs between two steps of its optimisers: for every call, the number of examples, their means and
    log variances; and the number of backward passes whose gradients were not discarded before the next call."""

    calls: list[int] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    moments: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    backward: int = 0


@dataclass
class _LayerTurns:
    number: int = 0
    now: Turn = field(default_factory=Turn)
    measuring: bool = False
    until: int = 0  # no measuring before this step
    history: list[Turn] = field(default_factory=list)
    several: int = 0  # turns in a row


class Turns:
    """Collects, for the first BN layers, the turns with several calls that update; reads nothing where there is one.

    `add` yields the path of a layer when there are `TURNS` turns in a row with the same number of calls, with them.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _LayerTurns] = {}
        self._parts: set[str] = set()
        self._judged = False

    @property
    def too_short(self) -> str:
        """How many steps with several calls there were, if too few to judge; empty if there were enough."""
        most = max((layer.several for layer in self._layers.values()), default=0)
        return f"{most} of {NEEDED} steps with several calls" if most and not self._judged else ""

    def add(self, run: TrainingRun, seen: Pass) -> Iterator[tuple[str, list[Turn]]]:
        """Take one pass of a layer."""
        if not seen.updates or seen.recomputed or run.stepping is not None:
            return
        layer = self._layers.get(seen.path)
        if layer is None:
            part = seen.path.partition(".")[0]
            if part in self._parts or len(self._layers) >= LAYERS:
                return
            self._parts.add(part)
            layer = self._layers[seen.path] = _LayerTurns(seen.turn)
        if seen.turn != layer.number:
            yield from self._close(run, seen.path, layer)
            layer.number, layer.now = seen.turn, Turn()
        turn = layer.now
        if turn.backward and _is_cleared(seen.layer, layer.measuring):
            turn.backward = 0
        if seen.call and turn.calls and turn.calls[-1] == seen.call:
            return  # a layer that is used several times within a call
        turn.calls.append(seen.call)
        turn.examples.append(seen.x.shape[0])
        if layer.measuring:
            _, mean, var = seen.moments
            turn.moments.append((mean.double(), (var.double() + seen.layer.eps).log()))

    def reached(self, path: str) -> None:
        """Count a backward pass through a layer."""
        layer = self._layers.get(path)
        if layer is not None:
            layer.now.backward += 1

    def end(self, run: TrainingRun) -> Iterator[tuple[str, list[Turn]]]:
        """The run is over: the last turn is, too."""
        for path, layer in self._layers.items():
            yield from self._close(run, path, layer)

    def _close(self, run: TrainingRun, path: str, layer: _LayerTurns) -> Iterator[tuple[str, list[Turn]]]:
        turn, several = layer.now, len(layer.now.calls) > 1
        layer.several = layer.several + 1 if several else 0
        if layer.measuring and several and len(turn.moments) == len(turn.calls):
            if layer.history and len(layer.history[0].calls) != len(turn.calls):
                layer.history.clear()
            layer.history.append(turn)
        elif layer.measuring:
            layer.history.clear()
        layer.measuring = several and run.step >= layer.until
        if len(layer.history) == TURNS:
            self._judged = True
            yield path, layer.history
            layer.history, layer.measuring, layer.until = [], False, run.step + REST * run.every


def _is_cleared(layer: _BatchNorm, look: bool) -> bool:
    """Whether a layer that had gradients has none any more: they were not for the step that comes."""
    own = [p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad]
    return bool(own) and all(p.grad is None or (look and not bool(p.grad.any())) for p in own)


@dataclass(frozen=True)
class Difference:
    """How far one call of a step consistently is from the others: standard deviations, log variance, significance.

    ``sureness`` is the square of the mean difference over that of its standard error, about 1 for equal ones; less
    where there are many calls, of which one is always the farthest.
    """

    position: int
    of_mean: float
    of_log_variance: float
    sureness: float


def difference(turns: list[Turn]) -> Difference:
    """Find the call that differs most from the others of its step, in the same way in every step.

    >>> data = [(torch.tensor([t]), torch.zeros(1)) for t in (0.0, 0.1, 0.05)]
    >>> turns = [Turn([1, 2], [8, 8], [(m, v), (m + 3, v)]) for m, v in data]
    >>> difference(turns).of_mean
    3.0
    """
    means, logs = (torch.stack([torch.stack([pair[i] for pair in turn.moments]) for turn in turns]) for i in (0, 1))
    means = means / logs.mean(dim=(0, 1)).exp().sqrt()
    found = []
    for position in range(means.shape[1]):
        by_mean, by_log = _apart(means, position), _apart(logs, position)
        found.append(Difference(position, by_mean[0], by_log[0], max(by_mean[1], by_log[1]) * 2 / means.shape[1]))
    return max(found, key=lambda d: d.of_mean + d.of_log_variance)


def _apart(values: Tensor, position: int) -> tuple[float, float]:
    """Of values (turn, call, channel): the constant distance of a call from the others, and how sure that is."""
    count = values.shape[1]
    one = values[:, position]
    gap = one - (values.sum(1) - one) / (count - 1)
    mean, noise = gap.mean(0).square().mean(), (gap.var(0) / len(gap)).mean()
    size = float((mean - noise).clamp(min=0).sqrt())
    return size, float(mean / noise) if float(noise) > 0 else (float("inf") if size else 1.0)


def differ(found: Difference) -> bool:
    """Whether the calls of a step see different kinds of data, by more than does no harm.

    >>> differ(Difference(1, 0.1, 0.0, 1000.0)), differ(Difference(1, 1.0, 0.0, 1000.0))
    (False, True)
    """
    return (found.of_mean > MEAN or found.of_log_variance > LOG_VARIANCE) and found.sureness > SURE


# The running mean lies between two kinds of data, so each is off by half of this (compare BN201's tolerances).
MEAN, LOG_VARIANCE = 0.4, 0.6
SURE = 40.0  # by chance once in 10000 times, of equal data
