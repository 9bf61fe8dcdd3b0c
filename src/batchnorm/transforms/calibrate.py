"""``calibrate``: recompute the running statistics exactly from data (lines 8 to 10 of Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.calling import batch_forward
from batchnorm.distributed.agreement import Together
from batchnorm.errors import BatchNormError
from batchnorm.functional import moments
from batchnorm.graph import check_forward, check_shapes
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.moments import Moments, merged
from batchnorm.optim import Optimizers
from batchnorm.records import Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import carry_over, check_changeable, check_optimizers, copied_with
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.measuring import (
    Forward,
    Measured,
    State,
    bar,
    no_batches,
    observing,
    replaced,
    sites,
    streamed,
)

Formula = Literal["merged", "paper"]
FORMULAS = get_args(Formula)
# How many parts of the stream are kept apart, to see how much they differ; beyond, neighbours are merged.
PARTS = 32


class Calibrated(Measured):
    """What `calibrate` did; ``restore()`` puts the old statistics back.

    >>> model, calibrated = calibrate(nn.Sequential(nn.BatchNorm1d(2)), torch.randn(256, 2).split(64))
    >>> calibrated.samples, calibrated.batches, calibrated.standard_error < 0.2
    (256, 4, True)
    >>> calibrated.restore()[0].running_var  # `with calibrated:` does it at the end of a block
    tensor([1., 1.])

    ``report`` lists what changed and what was left alone. ``samples`` and ``batches`` say how many were used,
    ``rejected`` how many batches were not, because every layer that they reached was given NaN or infinite values.
    ``standard_errors`` has, for each layer, the standard error of its means, in standard deviations, and of its
    variances, as a share of them (root mean square over channels); ``standard_error`` is the largest of all. They come
    from how much batches differ from one another, so positions of an image that are alike do not count as many.
    One batch cannot tell: infinity. ``enough`` says whether ``until`` was reached (None if there was none).
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__(model, state)
        self.samples = self.rejected = 0
        self.standard_errors: dict[str, tuple[float, float]] = {}
        self.enough: bool | None = None

    @property
    def standard_error(self) -> float:
        """The largest standard error of a layer.

        >>> calibrate(nn.BatchNorm1d(1), [torch.randn(4, 1)])[1].standard_error
        inf
        """
        return max((e for pair in self.standard_errors.values() for e in pair), default=math.inf)

    def figures(self) -> dict[str, Any]:
        """Return samples, batches (used and rejected) and standard errors, for `to_json`.

        >>> calibrate(nn.BatchNorm1d(1), [torch.randn(4, 1)])[1].figures()["samples"]
        4
        """
        errors = {"standard_error": self.standard_error, "standard_errors": self.standard_errors}
        counts = {"samples": self.samples, **super().figures(), "rejected": self.rejected}
        return {**counts, **errors, "enough": self.enough}

    def __repr__(self) -> str:
        layers = len(self.report.paths)
        refused = f", {self.rejected} more rejected" if self.rejected else ""
        return (
            f"Calibrated({layers} layer{'s' * (layers != 1)}, {self.batches} batches{refused}, {self.samples} samples, "
            f"standard error {self.standard_error:.2g})"
        )


def calibrate(
    model: nn.Module,
    batches: Iterable[Any] | Tensor,
    *,
    forward: Forward | None = None,
    formula: Formula = "merged",
    until: float | None = None,
    max_batches: int | None = None,
    process_group: Any = None,
    progress: bool | None = None,
    optimizer: Optimizers = None,
    inplace: bool = False,
) -> tuple[nn.Module, Calibrated]:
    """Recompute the running statistics from data. Returns the calibrated copy and a handle that restores the old ones.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))  # its statistics are still 0 and 1
    >>> x = torch.randn(512, 3) * 4 + 1
    >>> better, calibrated = calibrate(model, x.split(100))  # the last batch has 12
    >>> y = model[0](x)
    >>> torch.allclose(better[1].running_mean, y.mean(0), atol=1e-4), torch.allclose(better[1].running_var, y.var(0))
    (True, True)

    ``formula="merged"``: batches are merged by their counts, in float64, with the variance between them, so that the
    result for given layer inputs does not depend on the sizes of the batches. The variance is the unbiased one (n / (n
    - 1) for all n values of a channel), as in the paper and in the running average that torch keeps.
    ``formula="paper"`` is line 10 of Algorithm 2: the mean over batches of their means and of their unbiased variances,
    each batch weighing the same (`reference.population_statistics`).

    All BN layers use the statistics of each batch in the same pass, as in the paper and as in training; everything else
    is in evaluation mode (dropout is off). Layers that are called several times see all their calls. Frozen layers work
    with the statistics they have, and stay as they are (`unfreeze` them first); layers that the batches do not reach
    and those without running statistics are left alone, with the reason in the report. ``num_batches_tracked`` becomes
    the number of batches a layer saw.

    A batch is a tensor, a tuple or list that begins with one, or a dictionary of arguments; for anything else,
    ``forward`` takes the model and a batch. A tensor or a dictionary in the place of the batches is one batch.
    ``until=0.01`` stops when no layer's standard error is above (see `Calibrated`); it is estimated after batches 4, 5,
    6 and so on, and from 16 on whenever an eighth more have been read. ``max_batches`` stops in any case.
    ``process_group``: every process of the group runs its own share of the data, and all get the statistics of the
    whole; they stop together, and may have different numbers of batches. None: this process alone. ``progress``: a bar;
    by default, on a terminal. A batch that raises leaves the model and the optimizers as they were. ``optimizer``: one
    or several, made for ``model``; they follow to the copy with their groups and state. ``inplace`` changes the model
    itself. In a training loop give one of the two (see "Optimizers follow" in docs/transforms.md).
    """
    check_shapes(model, "calibrate")
    check_changeable(model, "calibrate", inplace=inplace)
    _check(formula, until, max_batches)
    check_forward(forward, "calibrate")
    optimizers = check_optimizers(model, optimizer, "calibrate")
    batches = streamed(batches, "calibrate")
    layers, left = sites(model, "calibrate")
    shared = [path for path, layer in layers if isinstance(layer, _BatchNormBase) and layer._shares()]
    if shared and process_group is None:
        raise BatchNormError(
            f"{shared[0] or 'the model'} shares its statistics with other processes, and this one would measure alone",
            where="calibrate",
            do="pass process_group=torch.distributed.group.WORLD (or the layers' own group)",
        )
    together = Together(process_group, "calibrate")
    given, moved = model, dict[int, Any]()
    if not inplace:
        model, moved = copied_with(model)
        layers, left = sites(model, "calibrate")
    state = State(model, [layer for _, layer in layers])
    calibrated = Calibrated(model, state)
    begun = _Count()
    seen = {layer: _StreamMoments(layer, formula, begun) for _, layer in layers}
    try:
        with ExitStack() as stack:
            stack.enter_context(together.failing_together())
            stack.enter_context(observing(model, seen))
            stack.enter_context(torch.no_grad())
            stream, say = stack.enter_context(bar(batches, "calibrating", progress))
            rounds = _rounds(stream, seen, begun, model, forward or batch_forward("calibrate"), until, max_batches)
            for more in rounds:
                going_on = together.any(more)
                total = _total(seen, layers, together, begun)
                _judge(calibrated, layers, total)
                calibrated.batches, calibrated.samples = total.batches, total.samples
                calibrated.rejected = total.rejected
                say(f"standard error {calibrated.standard_error:.2g}")
                if until is not None:
                    calibrated.enough = calibrated.standard_error <= until
                if calibrated.enough or not going_on:
                    break
        if not calibrated.batches + calibrated.rejected:
            raise no_batches("calibrate")
        calibrated.report = _write(layers, total, formula, left)
    except BaseException:
        state.put_back()
        raise
    state.put_modes_back()
    carry_over(optimizers, moved)
    left_behind(given, model, "calibrate", inplace=True)
    return Changed((model, calibrated))


class _Count:
    """Progress of this process: batches, the rejected ones, and the samples of the others."""

    def __init__(self) -> None:
        self.batches = self.samples = self.rejected = 0
        self.counted = self.refused = False  # by some layer, in this batch

    def end_batch(self) -> None:
        self.batches += 1
        self.rejected += self.refused and not self.counted
        self.counted = self.refused = False


class _StreamMoments:
    """The input of one layer: moments of parts of the stream, and the sums of the paper's formula."""

    def __init__(self, layer: _BatchNorm, formula: str, begun: _Count) -> None:
        assert layer.running_mean is not None
        self.layer, self.paper, self.begun = layer, formula == "paper", begun
        zeros = torch.zeros(len(layer.running_mean), dtype=torch.float64)
        self.now: list[Moments] = []  # of the calls of this batch
        self.parts: list[Moments] = []
        self.width = 1  # how many batches there are in a part
        self.filled = 0  # how many in the last one
        self.calls = self.minis = 0
        self.sums = [zeros, zeros]  # over mini-batches: means, unbiased variances

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        groups = self.layer._groups(x) if self.paper and isinstance(self.layer, _BatchNormBase) else 1
        found = Moments(*(t.cpu().double() for t in moments(x.detach(), mask=mask, groups=groups)))
        if not bool(torch.isfinite(found.mean).all() & torch.isfinite(found.var).all()):
            self.begun.refused = True
            return False
        if not self.begun.counted:
            self.begun.samples += x.shape[0]
            self.begun.counted = True
        if self.paper:  # a virtual batch is a batch too
            self._add_up(found if groups > 1 else Moments(*(t.unsqueeze(0) for t in found)))
        self.calls += 1
        self.now.append(merged(found))
        return True

    def _add_up(self, found: Moments) -> None:
        for count, mean, var in zip(*found, strict=True):
            if count > 1:
                self.minis += 1
                self.sums = [self.sums[0] + mean, self.sums[1] + var * (count / (count - 1))]

    def end_batch(self) -> None:
        """Close the part of the stream that the calls of this batch make up."""
        now, self.now = _whole(self.now), []
        if now is None or not now.count:
            return
        if self.parts and self.filled < self.width:
            self.parts[-1:] = [_pair(self.parts[-1], now)]
            self.filled += 1
            return
        if len(self.parts) == PARTS:
            self.parts = [_pair(*self.parts[i : i + 2]) for i in range(0, PARTS, 2)]
            self.width *= 2
        self.parts.append(now)
        self.filled = 1


class _Total:
    """Moments from all processes: one row of parts for each layer, with count 0 where there is none."""

    def __init__(self, batches: int, samples: int, rejected: int) -> None:
        self.batches, self.samples, self.rejected = batches, samples, rejected
        self.parts: list[Moments] = []
        self.calls: list[int] = []
        self.minis: list[int] = []
        self.sums: list[tuple[Tensor, Tensor]] = []


def _whole(parts: list[Moments]) -> Moments | None:
    """The moments of all parts, or None if there are none."""
    return merged(Moments(*map(torch.stack, zip(*parts, strict=True)))) if parts else None


def _pair(one: Moments, other: Moments) -> Moments:
    return merged(Moments(*map(torch.stack, zip(one, other, strict=True))))


def _rounds(
    stream: Iterable[Any],
    seen: dict[_BatchNorm, _StreamMoments],
    begun: _Count,
    model: nn.Module,
    forward: Forward,
    until: float | None,
    most: int | None,
) -> Iterator[bool]:
    """Run the model on batches and yield True where errors are to be estimated, then False at the end and after.

    The pauses depend on nothing but their number, so that processes with fewer batches pause with the others.
    """
    pause = 4
    for batch in stream:
        forward(model, batch)
        begun.end_batch()
        for site in seen.values():
            site.end_batch()
        if begun.batches == most:
            break
        if until is not None and begun.batches == pause:
            pause += max(1, pause // 8)
            yield True
    while True:
        yield False


def _total(
    seen: dict[_BatchNorm, _StreamMoments], layers: list[tuple[str, _BatchNorm]], group: Together, begun: _Count
) -> _Total:
    """Gather the moments of all processes."""
    numbers = [torch.tensor([begun.batches - begun.rejected, begun.samples, begun.rejected], dtype=torch.float64)]
    for _, layer in layers:
        site = seen[layer]
        channels = len(site.sums[0])
        count, both = torch.zeros(PARTS, dtype=torch.float64), torch.zeros(2, PARTS, channels, dtype=torch.float64)
        for place, part in enumerate(site.parts):
            count[place] = part.count
            both[0, place], both[1, place] = part.mean, part.var
        calls = torch.tensor([site.calls, site.minis], dtype=torch.float64)
        numbers += [calls, *site.sums, count, both.flatten()]
    rows = group.rows(torch.cat(numbers))
    total = _Total(*(int(count) for count in rows[:, :3].sum(0)))
    at = 3
    for _, layer in layers:
        channels = len(seen[layer].sums[0])
        sizes = [1, 1, channels, channels, PARTS, PARTS * channels, PARTS * channels]
        calls, minis, means, variances, count, mean, var = torch.split(rows[:, at : at + sum(sizes)], sizes, 1)
        at += sum(sizes)
        total.calls.append(int(calls.sum()))
        total.minis.append(int(minis.sum()))
        total.sums.append((means.sum(0), variances.sum(0)))
        shape = (-1, channels)
        total.parts.append(Moments(count.reshape(-1), mean.reshape(shape), var.reshape(shape)))
    return total


def _judge(calibrated: Calibrated, layers: list[tuple[str, _BatchNorm]], total: _Total) -> None:
    """Estimate the standard errors of every layer that was reached."""
    calibrated.standard_errors = {
        path: standard_errors(parts, layer.eps)
        for (path, layer), parts in zip(layers, total.parts, strict=True)
        if bool(parts.count.any())
    }


def standard_errors(parts: Moments, eps: float = 0.0) -> tuple[float, float]:
    """Return the standard errors of mean and variance of all parts together, from how the parts differ.

    >>> x = torch.randn(50, 100, 1, dtype=torch.float64)
    >>> parts = Moments(torch.full((50,), 100.0), x.mean(1), x.var(1, correction=0))
    >>> mean, var = standard_errors(parts)
    >>> 0.5 < mean * 5000**0.5 < 2, 0.5 < var * 2500**0.5 < 2  # sigma / sqrt(n), and sigma**2 * sqrt(2 / n)
    (True, True)

    In units of the standard deviation and of the variance (with ``eps``, as the layer uses them), as root mean square
    over channels.
    """
    some = parts.count > 0
    count, means, variances = (t[some] for t in parts)
    number = len(count)
    if number < 2:
        return math.inf, math.inf
    whole = merged(parts)
    share = (count / count.sum()).unsqueeze(1)
    apart = means - whole.mean
    spread = variances + apart**2 - whole.var  # of each part's second moment about the common mean
    width = whole.var + eps
    correction = number / (number - 1)
    of_mean = correction * (share**2 * apart**2).sum(0) / width
    of_var = correction * (share**2 * spread**2).sum(0) / width**2
    return tuple(float(e.nan_to_num(nan=0.0).mean().sqrt()) for e in (of_mean, of_var))  # type: ignore[return-value]


def _write(layers: list[tuple[str, _BatchNorm]], total: _Total, formula: str, left: dict[str, str]) -> Report:
    changes: list[Change] = []
    for at, (path, layer) in enumerate(layers):
        whole = merged(total.parts[at])
        if whole.count < 2 or (formula == "paper" and not total.minis[at]):
            left[path] = "one value has no variance" if whole.count else "no batch of finite numbers reached it"
            continue
        mean, var = whole.mean, whole.var * (whole.count / (whole.count - 1))
        if formula == "paper":
            mean, var = (s / total.minis[at] for s in total.sums[at])
        changes += replaced(path, layer, mean, var)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(total.calls[at])
    return Report(tuple(changes), left)


def _check(formula: str, until: float | None, max_batches: int | None) -> None:
    for name, value, good, wanted in (
        ("formula", formula, formula in FORMULAS, "use one of " + ", ".join(map(repr, FORMULAS))),
        ("until", until, until is None or until > 0, "use a small positive number such as 0.01"),
        ("max_batches", max_batches, max_batches is None or max_batches >= 1, "use 1 or more, or None for all"),
    ):
        if not good:
            raise BatchNormError(f"{name} is {value!r}", where="calibrate", do=wanted)
