"""Batches so small that their statistics are mostly noise.

## What it does
Measures how far the mean of a batch lies from that of the data, in standard deviations, at every BN layer that
normalises with batches of fewer than 16 examples. It is
reported if it is as noisy as the mean of fewer than 8 independent values. The positions of an image or a sequence are
not independent: neighbours are alike, so a map of a thousand pixels may count as little as two values. While
training runs, the same is measured within the batches.

## Why is this bad?
Every example is normalised with the noise of its neighbours: training is slow and unstable, and the running statistics,
which are used in evaluation, are those of no batch. Detection and segmentation with one or two images a device suffer
most. Gradient accumulation does not help: it enlarges the batch of the optimiser, not that of BN.

## Example
```python
loader = DataLoader(dataset, batch_size=2)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
```

## Use instead
```python
bn.SyncBatchNorm(64)  # the batch of all processes
bn.BatchRenorm(64)  # running statistics in training too
nn.GroupNorm(8, 64)  # no batch at all
model, report = bn.freeze(model)  # the statistics of pre-training
```

## Fix safety
No automatic fix: each way out is another network, and the choice is yours.

## References
- xuebinqin/BASNet#42
- microsoft/CNTK#905
- Wu & He (2018), Group Normalization: the error rises below 8 images a device
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.tallies import SHARED, layer_is_local, shared, training_norms
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.functional import moments
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.renorm import BatchRenorm
from batchnorm.moments import Moments, merged
from batchnorm.records import Finding

WORTH = 8.0  # independent values: below, the noise of a mean is more than 0.35 standard deviations
EXAMPLES = 16  # a batch that has more is not tiny, whatever its examples are worth
BATCHES = 4  # that it takes to see how much they differ
REPAIR = "larger batches, bn.SyncBatchNorm over processes, bn.BatchRenorm, nn.GroupNorm, or bn.freeze"


class _BatchTally:
    """The moments of every batch of one layer."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.parts: list[Moments] = []
        self.examples: list[int] = []

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        groups = self.layer._groups(x) if isinstance(self.layer, _BatchNormBase) else 1
        found = moments(x.detach(), mask=mask, groups=groups)
        if not bool(found.mean.isfinite().all() & found.var.isfinite().all()):
            return True  # another rule's business
        rows = [found] if groups == 1 else [Moments(*row) for row in zip(*found, strict=True)]
        self.parts += [Moments(*(t.cpu().double() for t in row)) for row in rows]
        self.examples += [x.shape[0] // groups] * groups
        return True

    def worth(self) -> float:
        """As many independent values as would make means of this noise."""
        parts = Moments(*map(torch.stack, zip(*self.parts, strict=True)))
        whole = merged(parts)
        number = len(self.parts)
        noise = (parts.mean - whole.mean).square().sum(0) / (number - 1)
        some = whole.var > 0
        return float(1 / (noise[some] / whole.var[some]).mean()) if bool(some.any()) else math.inf


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the means of the batches with each other."""
    tallies = shared(subject, RULE.code)
    for path, layer in _norms(subject).items():
        tally = tallies[layer]
        if len(tally.parts) < BATCHES or sorted(tally.examples)[len(tally.examples) // 2] >= EXAMPLES:
            continue
        worth = tally.worth()
        if worth < WORTH:
            yield _found(path, worth, sorted(tally.examples)[len(tally.examples) // 2], float(tally.parts[0].count))


def _norms(subject: Subject) -> dict[str, _BatchNorm]:
    return {path: layer for path, layer in training_norms(subject).items() if _suffers(layer)}


def _suffers(layer: _BatchNorm) -> bool:
    return layer_is_local(layer) and not isinstance(layer, BatchRenorm)


def _found(path: str, worth: float, examples: int, values: float, step: int | None = None) -> Finding:
    noise = math.sqrt(1 / worth) if worth > 0 else math.inf
    return RULE.found(
        path,
        f"a batch of {examples} gives it the mean with an error of {noise:.2g} standard deviations, as {worth:.2g} "
        "independent values would",
        REPAIR,
        step=step,
        worth=worth,
        noise=noise,
        examples=examples,
        values=int(values),
    )


class _Watcher(Watcher):
    """Looks at tiny batches only; how much the examples of a batch differ tells the noise of their mean."""

    def __init__(self) -> None:
        self.passes: dict[str, list[int]] = {}  # of a layer: those in training, and how many of them were tiny
        self.ratios: dict[str, list[float]] = {}  # of a layer: noise of the mean, as a share of the variance

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if not seen.from_batch or not seen.gradients or seen.recomputed:
            return
        counted = self.passes.setdefault(seen.path, [0, 0])
        counted[0] += 1
        groups = seen.layer._groups(seen.x) if isinstance(seen.layer, _BatchNormBase) else 1
        if seen.x.dim() < 2 or seen.mask is not None or seen.x.shape[0] // groups >= EXAMPLES:
            return
        counted[1] += 1
        if not run.looking or not _suffers(seen.layer):
            return
        noise = _noise(seen, groups)
        if noise is None or not math.isfinite(noise):
            return
        ratios = self.ratios.setdefault(seen.path, [])
        ratios.append(noise)
        mean = sum(ratios) / len(ratios)
        # The last batch of an epoch may be short; that the others are, is another matter.
        if len(ratios) >= BATCHES - 1 and counted[1] > counted[0] / 2 and mean > 1 / WORTH:
            yield _found(seen.path, 1 / mean, seen.x.shape[0] // groups, seen.values // groups, run.step)

    def too_short(self, run: TrainingRun) -> str:
        tiny = [path for path, (passes, few) in self.passes.items() if few > passes / 2 and _suffers(run.layers[path])]
        needed = (BATCHES - 2) * run.every + 1
        if not tiny or run.step >= needed or any(len(ratios) >= BATCHES - 1 for ratios in self.ratios.values()):
            return ""
        return f"{run.step} of {needed} steps, for batches of fewer than {EXAMPLES}"


def _noise(seen: Pass, groups: int) -> float | None:
    """The variance of a batch's mean as a share of that of its values, over channels; None if unknown."""
    x, layer = seen.x.detach(), seen.layer
    examples = x.shape[0] // groups
    if examples > 1:
        each = moments(x, groups=x.shape[0])  # of every example; those of all follow without reading it again
        total = merged(each).var
        between = each.mean.var(0) / examples
        # The variance about the mean of all data has that of the mean in it, too.
        total = total + between
        some = total > 0
        return float((between[some] / total[some]).mean()) if bool(some.any()) else None
    if layer.running_mean is None or layer.running_var is None or run_is_young(layer):
        return None
    mean, var = layer.running_mean.double(), layer.running_var.double() + layer.eps
    return float(((seen.moments.mean.to(mean) - mean).square() / var).mean())


def run_is_young(layer: _BatchNorm) -> bool:
    """Whether running statistics have seen too little to stand for the data."""
    seen = layer.num_batches_tracked
    return seen is None or int(seen) < 20


RULE = Rule("BN205", "tiny-batch", "warning", __doc__, look, ("model", "data"), watch=_Watcher)
SHARED[RULE.code] = lambda subject: {layer: _BatchTally(layer) for layer in _norms(subject).values()}
