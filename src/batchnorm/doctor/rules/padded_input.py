"""Padding that is counted in the statistics.

## What it does
Inspects the input of BN layers in training for stretches at the end (or at the beginning) of sequences and images that
are exactly constant in all channels, the same in all examples, and of different lengths: padding. It measures by how
much that changes the mean and the variance.

A background is not padding: the black border of a drawing lies on all sides, and black pixels lie between the strokes,
too. So nothing is reported where more than 15 % of the remaining positions have the same values as the supposed
padding, where fewer than half of the batches have any, or where the batches have it on different sides (random crops
and shifts). If the model takes a single sequence or image tensor in which there is no padding, its layers have none.

## Why is this bad?
The statistics depend on how much padding a batch happens to have: a batch of one long and many short sequences is
normalised differently from one of equal lengths, and evaluation, one sequence at a time and without padding,
differently from training. Sorting by length makes it worse, because batches then differ.

## Example
```python
x = nn.utils.rnn.pad_sequence(sequences, batch_first=True).transpose(1, 2)
y = nn.BatchNorm1d(64)(conv(x))
```

## Use instead
```python
lengths = torch.tensor([len(s) for s in sequences])
y = bn.MaskedBatchNorm(64)(conv(x), lengths)
```

## Fix safety
No automatic fix: the layers need the lengths, which only the program knows.

## References
- pytorch/pytorch#70529
- SeanNaren/deepspeech.pytorch#312
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject, spread
from batchnorm.doctor.tallies import FED, SHARED, shared, training_norms
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.functional import moments
from batchnorm.moments import Moments, distance, merged
from batchnorm.nested import tensors_in
from batchnorm.records import Finding

OFF, APART = 0.1, 0.1  # standard deviations; natural logarithm of the ratio of variances
SHARE = 0.05  # of all positions: less does not matter
ELSEWHERE = 0.15  # of the other positions: constant values that are so frequent there are a background
OFTEN = 0.5  # of the batches
LOOKS = 2  # batches of a training run
EDGE = 4  # positions that a convolution's own zeros may have changed
FEW = 4  # channels that are compared first
REPAIR = "bn.MaskedBatchNorm, or bn.BatchNorm1d/2d/3d with mask=lengths"


class _PaddingTally:
    """The moments of one layer's padded inputs, with the padding and without it, and how many batches have any."""

    def __init__(self) -> None:
        self.all: list[Moments] = []
        self.real: list[Moments] = []
        self.sides: Counter[Sides] = Counter()
        self.batches = self.positions = self.padded = 0

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        found = None if mask is not None else padding_in(x)
        self.batches += 1
        if found is None:
            return True
        real, sides = found
        self.sides[sides] += 1
        self.all.append(_wide(moments(x)))
        self.real.append(_wide(moments(x, mask=real)))
        self.positions += real.numel()
        self.padded += int((~real).sum())
        return True

    def verdict(self, eps: float) -> dict[str, Any]:
        """How far the moments are apart; nothing if there is no padding, or if it does no harm."""
        if not self.sides or self.sides.most_common(1)[0][1] < OFTEN * self.batches:
            return {}
        whole, real = (merged(Moments(*map(torch.stack, zip(*m, strict=True)))) for m in (self.all, self.real))
        off, apart = map(float, distance(whole.mean, whole.var, real.mean, real.var, eps))
        if not (off > OFF or apart > APART):
            return {}
        share = self.padded / self.positions
        return {
            "share": share, "mean_off": off, "variance_log_ratio": apart, "padded_batches": len(self.all),
            "batches": self.batches,
        }  # fmt: skip


def _wide(found: Moments) -> Moments:
    return Moments(*(t.cpu().double() for t in found))


Sides = tuple[tuple[int, bool], ...]  # of the padding: the axis, and whether it comes first


def counts_in(x: Tensor) -> Tensor | None:
    """Where a batch of sequences or images is not padding, (N, positions...); None if nothing looks like padding."""
    found = padding_in(x)
    return None if found is None else found[0]


def padding_in(x: Tensor) -> tuple[Tensor, Sides] | None:
    """The positions of a batch that are not padding, (N, positions...), and on which sides the padding is.

    None if there is no padding.
    """
    if x.dim() < 3 or x.shape[0] < 2 or not x.dtype.is_floating_point:
        return None
    x = x.detach()
    mask = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
    found: list[tuple[int, bool, Tensor]] = []
    for axis in range(2, x.dim()):
        size = x.shape[axis]
        if size < 4:
            continue
        few = _same(x[:, :: -(-x.shape[1] // FEW)], axis)
        for edge in range(min(EDGE, size // 4) + 1):
            after, before = (_runs(x, axis, few, edge, first) for first in (False, True))
            if bool(after.any() or before.any()):
                break
        after, before = _alike(x, axis, after, edge, False), _alike(x, axis, before, edge, True)
        # An image with a plain background has it on both sides, and zeros after a ReLU lie anywhere.
        if max(after.sum(), before.sum()) < 5 * min(after.sum(), before.sum()):
            continue
        left = bool(before.sum() > after.sum())
        runs = before if left else after
        lengths = size - runs
        if bool((lengths == lengths[0]).all()):
            continue
        places = torch.arange(size, device=x.device)
        inside = (places.flip(0) if left else places) < lengths.unsqueeze(1)
        shape = [x.shape[0]] + [1] * (x.dim() - 2)
        shape[axis - 1] = size
        mask &= inside.view(shape)
        found.append((axis, left, x.select(axis, edge if left else size - 1 - edge)[runs > 0][0]))
    if not found or float((~mask).double().mean()) < SHARE or not bool(mask.any()):
        return None
    for axis, _, line in found:
        if float((x == line.unsqueeze(axis - 1)).all(1)[mask].double().mean()) > ELSEWHERE:
            return None
    return mask, tuple((axis, left) for axis, left, _ in found)


def unpadded(*given: Any) -> bool:
    """Whether the arguments of a model are one tensor of sequences or images without padding, in any layout.

    >>> unpadded(torch.randn(4, 3, 8)), unpadded(torch.randn(4, 3))
    (True, False)
    """
    tensors = [t for t in tensors_in(*given) if t.dim() > 2 and t.dtype.is_floating_point and not t.is_meta]
    if len(tensors) != 1 or tensors[0].layout is not torch.strided or len(tensors[0]) < 2:
        return False
    x = tensors[0]
    layouts = [x, x.movedim(-1, 1), *([x.permute(1, 2, 0)] if x.dim() == 3 else [])]
    return not any(padding_in(layout) for layout in layouts)


def _runs(x: Tensor, axis: int, few: Tensor, edge: int, first: bool) -> Tensor:
    """How many lines at the end of each example (or at its beginning) repeat one another, along an axis.

    The outermost ``edge`` may be others, and count too. A line is padding only if it is in all channels: where a few
    see none, the others need not be read, and where they do, only as far as those saw it.
    """
    runs = _inwards(few, edge, first)
    far = int(runs.max())
    if not far or x.shape[1] <= FEW:
        return runs
    return _inwards(_same(x.narrow(axis, 0 if first else x.shape[axis] - far, far), axis), edge, first)


def _same(x: Tensor, axis: int) -> Tensor:
    """Whether a line is as the one after it, (N, lines - 1)."""
    lines = x.movedim(axis, 1).flatten(2)  # (N, lines, values of a line)
    return (lines[:, 1:] == lines[:, :-1]).all(2)


def _inwards(same: Tensor, edge: int, first: bool) -> Tensor:
    runs = (same if first else same.flip(1))[:, edge:].long().cumprod(1).sum(1)
    return torch.where(runs > 0, runs + 1 + edge, 0)


def _alike(x: Tensor, axis: int, padded: Tensor, edge: int, first: bool) -> Tensor:
    """The same, if all examples that have such lines have the same: padding is of one kind."""
    ends = x.select(axis, edge if first else x.shape[axis] - 1 - edge)[padded > 0]
    return padded if bool((ends == ends[:1]).all()) else torch.zeros_like(padded)


def look(subject: Subject) -> Iterator[Finding]:
    """Find padding in the inputs of the layers, and measure its effect."""
    layers, tallies = training_norms(subject), shared(subject, RULE.code)
    found = {path: tallies[layer].verdict(layer.eps) for path, layer in layers.items()}
    if not any(found.values()):
        return
    inputs = [subject._input(batch) for batch in spread(subject.batches, FED)] or [subject.example]
    if sum(map(unpadded, inputs)) > OFTEN * len(inputs):
        return
    for path, numbers in found.items():
        if numbers:
            yield _found(path, numbers)


def _found(path: str, numbers: dict[str, Any], step: int | None = None) -> Finding:
    batches = numbers["batches"]
    some = f" in {numbers['padded_batches']} of {batches} batches" if numbers["padded_batches"] < batches else ""
    return RULE.found(
        path,
        f"{numbers['share']:.0%} of the positions of its input are padding{some}, which moves the mean by "
        f"{numbers['mean_off']:.2g} standard deviations and the variance by a factor of "
        f"{math.exp(numbers['variance_log_ratio']):.2g}",
        REPAIR,
        step=step,
        **numbers,
    )


class _Watcher(Watcher):
    """Adds up the batches of every layer; those of a call whose own input has no padding are not inspected."""

    def __init__(self) -> None:
        self.tallies: dict[str, _PaddingTally] = {}
        self.plain = False

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.plain = run.looking and unpadded(arguments, keywords)
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if not run.looking or not seen.from_batch or seen.mask is not None or seen.recomputed or seen.x.dim() < 3:
            return
        tally = self.tallies.setdefault(seen.path, _PaddingTally())
        if self.plain:
            tally.batches += 1
        else:
            tally.add(seen.x, None)
            if tally.batches >= LOOKS and (numbers := tally.verdict(seen.layer.eps)):
                yield _found(seen.path, numbers, run.step)

    def too_short(self, run: TrainingRun) -> str:
        waiting = [tally.batches for tally in self.tallies.values() if tally.sides and tally.batches < LOOKS]
        return f"{max(waiting)} of {LOOKS} batches with what may be padding" if waiting else ""


RULE = Rule("BN206", "padded-input", "warning", __doc__, look, ("model", "example"), watch=_Watcher)
SHARED[RULE.code] = lambda subject: {layer: _PaddingTally() for layer in training_norms(subject).values()}
