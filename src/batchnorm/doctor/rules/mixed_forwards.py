"""Several calls in a step on different data: the running statistics are an average that fits none of it.

## What it does
Where a model is called several times in a step, with updates, it compares what the first BN layers are given in the
first, second, ... call, over a dozen steps: by how many standard deviations the means differ, and by which factor the
variances. What differs by chance only (micro-batches, two views of the same images) is not reported.

## Why is this bad?
In training each call is normalised by its own batch; in evaluation all are by one running average, which moved a little
towards each of them in turn. A discriminator that saw real and generated images in separate batches, or a student that
saw labelled, unlabelled and mixed ones, is another network in evaluation, for all of them; and the last call of a step
counts more than the first.

## Example
```python
loss = criterion(discriminator(real), ones) + criterion(discriminator(fake), zeros)
```

## Use instead
```python
loss_real = criterion(discriminator(real), ones)
with bn.no_update(discriminator):  # what evaluation will not see does not move the statistics
    loss_fake = criterion(discriminator(fake), zeros)
```
Or one call on both, ``discriminator(torch.cat([real, fake]))``; or statistics for each, `batchnorm.DomainBatchNorm`.

## Fix safety
No automatic fix: which data evaluation will see is for the loop to say.

## References
- YU1ut/MixMatch-pytorch#43, YU1ut/MixMatch-pytorch#20
- soumith/ganhacks#52
- carpedm20/DCGAN-tensorflow#266
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.turns import Turn, Turns, differ, difference
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.records import Finding

_ORDER = ("first", "second", "third", "fourth", "fifth")


class _Watcher(Watcher):
    def __init__(self) -> None:
        self.turns = Turns()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        for path, turns in self.turns.add(run, seen):
            yield from _judge(run, path, turns)

    def too_short(self, run: TrainingRun) -> str:
        return self.turns.too_short

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        for path, turns in self.turns.end(run):
            yield from _judge(run, path, turns)


def _judge(run: TrainingRun, path: str, turns: list[Turn]) -> Iterator[Finding]:
    found = difference(turns)
    if differ(found):
        calls = len(turns[0].calls)
        which = _ORDER[found.position] if found.position < len(_ORDER) else f"{found.position + 1}th"
        yield RULE.found(
            path,
            f"{calls} calls a step move its statistics, and the {which} sees other data: its mean is "
            f"{found.of_mean:.2g} standard deviations from the others', its variance differs by a factor of "
            f"{math.exp(found.of_log_variance):.2g}",
            "`with bn.no_update(model):` around what evaluation will not see, one call on both, or DomainBatchNorm",
            step=run.step,
            calls=calls,
            mean_apart=found.of_mean,
            log_variance_apart=found.of_log_variance,
            sureness=min(found.sureness, 1e9),
            steps=len(turns),
        )


RULE = Rule("BN303", "mixed-forwards", "warning", __doc__, needs=("run",), watch=_Watcher)
