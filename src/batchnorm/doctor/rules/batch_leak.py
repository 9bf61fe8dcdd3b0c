"""Batches that are grouped by class: what an example becomes depends on its neighbours, and they give the class away.

## What it does
Compares how much the class counts of batches differ with what chance would make of the same examples, and, where that
is too much, how much the batch means at the BN layers do. It needs the labels: batches that are (input, label) pairs in
a check, ``run.set_labels(labels)`` before each call in a training run.

What it cannot see: whether two encoders of a contrastive loss get the same batch in the same order. A key encoder that
follows by a moving average and runs in training mode is harmful in MoCo, whose loss tells the examples of a batch
apart, and harmless in BYOL, whose loss does not; seen from the layers the two are alike. Where the loss has negatives,
call the key encoder as `batchnorm.shuffled` does, or give it `batchnorm.SplitBatchNorm`. Nor can it see groups that are
not in the labels (frames of one video, patches of one slide).

## Why is this bad?
In training, BN subtracts the mean of the batch. If the batch is of one class, that is the mean of the class: the
network never sees what tells classes apart, or learns from the batch what it should learn from the example. In
evaluation the running statistics are those of all classes, and the accuracy falls apart.

## Example
```python
loader = DataLoader(ImageFolder(root), batch_size=32)  # sorted by folder: 32 times the same class
```

## Use instead
```python
loader = DataLoader(ImageFolder(root), batch_size=32, shuffle=True)
```

## Fix safety
No automatic fix: the data has to be shuffled.

## References
- facebookresearch/moco#46, facebookresearch/moco#137
- lightly-ai/lightly#18
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.preserve import in_mode
from batchnorm.records import Finding

BATCHES = 32  # whose classes are counted before one judges
MEASURED = 12  # sampled batches
STRIDE = 1024  # at most, from one batch that is looked at to the next
SPREAD = 2.0  # times as much as by chance
SURE = 8.0  # standard deviations of chance
MOVED = 4.0  # times as much do the batch means vary


def spread(counts: list[Counter[int]]) -> tuple[float, float]:
    """By which factor class counts differ more than chance makes them (chi squared), and how sure that is.

    >>> spread([Counter({0: 8}), Counter({1: 8})] * 4)[0], spread([Counter({0: 4, 1: 4})] * 4)[0]
    (9.142857142857142, 0.0)
    """
    total = sum(counts, Counter())
    if len(counts) < 4 or len(total) < 2:
        return 1.0, 0.0
    common = [label for label, count in total.items() if count >= len(counts)]  # rare ones are counted together
    table = torch.tensor([[c[k] for k in common] for c in counts], dtype=torch.float64).reshape(len(counts), -1)
    sizes = torch.tensor([sum(c.values()) for c in counts], dtype=torch.float64)
    rest = sizes - table.sum(1)
    if float(rest.sum()):
        table = torch.cat([table, rest[:, None]], 1)
    if table.shape[1] < 2:
        return 1.0, 0.0
    expected = sizes[:, None] * table.sum(0) / sizes.sum()
    chi, freedom = float(((table - expected).square() / expected).sum()), (table.shape[0] - 1) * (table.shape[1] - 1)
    return chi / freedom, (chi - freedom) / (2 * freedom) ** 0.5


class Means:
    """How much the batch means at one layer vary, as a multiple of what they would if batches were drawn by chance."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor) -> None:
        """Take the input of a layer: the mean over an example's positions is one draw."""
        each = x.detach().flatten(2).mean(2) if x.dim() > 2 else x.detach()
        if len(each) > 1:
            var, mean = torch.var_mean(each.double(), 0)
            self.parts.append((mean, var / len(each)))

    def ratio(self) -> float:
        """The variance of the batch means over that expected; about 1 by chance."""
        if len(self.parts) < 4:
            return 1.0
        means, expected = (torch.stack([part[i] for part in self.parts]) for i in (0, 1))
        chance, seen = expected.mean(0), means.var(0)
        alive = chance > 1e-12 * (seen + means.square().mean(0))  # a channel that is constant says nothing
        return float((seen[alive] / chance[alive]).mean()) if bool(alive.any()) else 1.0


def _counted(labels: Tensor) -> Counter[int]:
    return Counter(labels.flatten().tolist())


def look(subject: Subject) -> Iterator[Finding]:
    """Count the classes of the batches; where they are grouped, look at the batch means in training mode."""
    labels = [subject.labels(batch) for batch in subject.batches]
    counts = [_counted(label) for label in labels if label is not None]
    factor, sure = spread(counts)
    if factor < SPREAD or sure < SURE or not subject.layers:
        return
    means = {path: Means() for path, _ in subject.layers}
    model = in_mode(copy.deepcopy(subject.net), True)

    def see(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], Tensor) and given[0].dim() > 1:
                means[path].add(given[0])

        return hook

    for path in means:
        model.get_submodule(path).register_forward_pre_hook(see(path))
    with torch.no_grad():
        for batch in subject.batches[:: -(-len(subject.batches) // MEASURED)]:  # neighbours may be of the same class
            try:
                subject.run_batch(model, batch)
            except ValueError:  # one value per channel
                continue
    # A network that is not in training may have been given the data of its evaluation, whose order does no harm.
    severity = None if subject.net.training else "advice"
    yield from _judge(means, counts, factor, severity, None)


def _judge(
    means: Mapping[str, Means], counts: list[Counter[int]], factor: float, severity: str | None, step: int | None
) -> Iterator[Finding]:
    ratios = {path: mean.ratio() for path, mean in means.items()}
    path = max(ratios, key=lambda p: ratios[p], default="")
    if not ratios or ratios[path] < MOVED:
        return
    classes, present = len(sum(counts, Counter())), sum(len(c) for c in counts) / len(counts)
    yield RULE.found(
        path,
        f"batches are grouped by class ({present:.2g} of {classes} in a batch, counts vary {factor:.2g} times as much "
        f"as by chance), and its batch means vary {ratios[path]:.2g} times as much as those of shuffled batches",
        "shuffle the training data (DataLoader(shuffle=True))",
        severity=severity,
        step=step,
        count_spread=factor,
        mean_spread=ratios[path],
        classes=classes,
        classes_in_a_batch=present,
        batches=len(counts),
    )


class _Watcher(Watcher):
    """Counts the classes of the batches; only where they are grouped it reads activations.

    A sorted data set has many batches of one class in a row, so after looking in vain it looks at every second batch,
    then at every fourth, and so on, keeping half of what it has.
    """

    def __init__(self) -> None:
        self.counts: list[Counter[int]] = []
        self.means: dict[str, Means] | None = None
        self.calls = self.measured = 0
        self.stride = 1
        self.now = self.judged = False

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        labels, self.now = run.labels, False
        if labels is not None and labels.dim() == 1 and not labels.dtype.is_floating_point and run.gradients:
            self.now = self.calls % self.stride == 0
            self.calls += 1
        if self.now and self.means is None:
            assert labels is not None
            self.counts.append(_counted(labels))
            if len(self.counts) == BATCHES:
                self.judged = True
                factor, sure = spread(self.counts)
                if factor > SPREAD and sure > SURE:
                    self.means, self.measured = {}, 0
                    self.stride *= -(-BATCHES // MEASURED)  # over as long a stretch
                else:
                    self._look_farther()
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        wanted = self.means is not None and self.now and seen.call and seen.from_batch and not seen.recomputed
        if wanted and self.means is not None and seen.x.dim() > 1:
            self.means.setdefault(seen.path, Means()).add(seen.x)
        yield from ()

    def on_return(self, run: TrainingRun, output: Any) -> Iterator[Finding]:
        if self.means is not None and self.now:
            self.measured += 1
            if self.measured == MEASURED:
                yield from _judge(self.means, self.counts, spread(self.counts)[0], None, run.step)
                self._look_farther()

    def too_short(self, run: TrainingRun) -> str:
        if self.judged or not self.calls:
            return ""
        return f"the labels of {self.calls} of {BATCHES} batches"

    def lacks(self, run: TrainingRun) -> str:
        return "" if self.calls else "the class labels of the batches (run.set_labels(labels))"

    def _look_farther(self) -> None:
        self.counts, self.means = self.counts[::2], None
        self.stride = min(2 * self.stride, STRIDE)


RULE = Rule("BN306", "batch-leak", "warning", __doc__, look, ("model", "labels"), watch=_Watcher)
