"""Padding that is counted in the statistics.

## What it does
Looks at what BN layers are given in training, for stretches at the end (or at the beginning) of sequences and images
that are exactly constant, the same in all examples, and of different lengths: padding. It measures how far mean and
variance are from those of what is not padding.

## Why is this bad?
The statistics depend on how much padding a batch happens to have: a batch of one long and many short sequences is
normalised otherwise than one of equal lengths, and evaluation, one sequence at a time and without padding, otherwise
than training. Sorting by length makes it worse, because batches then differ.

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
None by machine: the layers have to be told the lengths, which only the program knows.

## References
- pytorch/pytorch#70529
- SeanNaren/deepspeech.pytorch#312
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import Run
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.tallies import SHARED, shared, training_norms
from batchnorm.doctor.watcher import Pass, Watcher
from batchnorm.functional import moments
from batchnorm.moments import Moments, merged
from batchnorm.records import Finding

OFF, APART = 0.1, 0.1  # standard deviations; natural logarithm of the ratio of variances
SHARE = 0.05  # of all positions: less does not matter
EDGE = 4  # positions that a convolution's own zeros may have changed
FEW = 4  # channels that are looked at first
REPAIR = "bn.MaskedBatchNorm, or bn.BatchNorm1d/2d/3d with mask=lengths"


class _Tally:
    """The moments of what one layer was given, with its padding and without."""

    def __init__(self) -> None:
        self.all: list[Moments] = []
        self.real: list[Moments] = []
        self.positions = self.padded = 0

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        real = None if mask is not None else counts_in(x)
        if real is None:
            return True
        self.all.append(_wide(moments(x)))
        self.real.append(_wide(moments(x, mask=real)))
        self.positions += real.numel()
        self.padded += int((~real).sum())
        return True

    def verdict(self, eps: float) -> dict[str, Any]:
        """How far the moments are apart; nothing if there is no padding, or if it does no harm."""
        if not self.all:
            return {}
        whole, real = (merged(Moments(*map(torch.stack, zip(*m, strict=True)))) for m in (self.all, self.real))
        width = real.var + eps
        off = float(((whole.mean - real.mean).square() / width).mean().sqrt())
        apart = float(((whole.var + eps) / width).log().square().mean().sqrt())
        if not (off > OFF or apart > APART):
            return {}
        return {"share": self.padded / self.positions, "mean_off": off, "variance_log_ratio": apart}


def _wide(found: Moments) -> Moments:
    return Moments(*(t.cpu().double() for t in found))


def counts_in(x: Tensor) -> Tensor | None:
    """Where a batch of sequences or images is not padding, (N, positions...); None if nothing looks like padding."""
    if x.dim() < 3 or x.shape[0] < 2 or not x.dtype.is_floating_point:
        return None
    x = x.detach()
    mask = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
    found = False
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
        lengths = size - (before if left else after)
        if bool((lengths == lengths[0]).all()):
            continue
        places = torch.arange(size, device=x.device)
        inside = (places.flip(0) if left else places) < lengths.unsqueeze(1)
        shape = [x.shape[0]] + [1] * (x.dim() - 2)
        shape[axis - 1] = size
        mask &= inside.view(shape)
        found = True
    padded = float((~mask).double().mean())
    return mask if found and padded >= SHARE and bool(mask.any()) else None


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
    """Look for padding in what the layers are given, and measure what it does."""
    tallies = shared(subject, RULE.code)
    for path, layer in training_norms(subject).items():
        numbers = tallies[layer].verdict(layer.eps)
        if numbers:
            yield _found(path, numbers)


def _found(path: str, numbers: dict[str, Any], step: int | None = None) -> Finding:
    return RULE.found(
        path,
        f"{numbers['share']:.0%} of the positions it is given are padding, which moves the mean by "
        f"{numbers['mean_off']:.2g} standard deviations and the variance by a factor of "
        f"{math.exp(numbers['variance_log_ratio']):.2g}",
        REPAIR,
        step=step,
        **numbers,
    )


class _Watcher(Watcher):
    def on_pass(self, run: Run, seen: Pass) -> Iterator[Finding]:
        if not run.looking or not seen.from_batch or seen.mask is not None or seen.recomputed or seen.x.dim() < 3:
            return
        tally = _Tally()
        tally.add(seen.x, None)
        numbers = tally.verdict(seen.layer.eps)
        if numbers:
            yield _found(seen.path, numbers, run.step)


RULE = Rule("BN206", "padded-input", "warning", __doc__, look, ("model", "example"), watch=_Watcher)
SHARED[RULE.code] = lambda subject: {layer: _Tally() for layer in training_norms(subject).values()}
