"""Gradient accumulation, which does not enlarge the batch of BN.

## What it does
Counts the backward passes and the updates of the running statistics between two optimiser steps, and says how many
examples BN normalises together and what the momentum comes to. Calls on data of different kinds are BN303's; a batch
that is shown twice (as sharpness-aware optimisers do), closures that the optimiser calls (LBFGS) and backward passes
whose gradients are cleared before the step (a generator's, while its critic trains) are none.

## Why is this bad?
The gradient is that of the large batch, but each micro-batch is normalised by its own moments, as noisy as it is small;
and the running statistics are updated k times a step, so that a momentum of 0.1 works as 1 - 0.9^k. Training with
"batch 64" as 16 times 4 is training BN with batches of 4.

## Example
```python
for i, (x, y) in enumerate(loader):
    criterion(model(x), y).backward()
    if i % 16 == 15:
        optimizer.step()
```

## Use instead
```python
with bn.accumulate(model):  # for every step: the micro-batches enter the statistics as the one batch they are
    for x, y in micro_batches:
        criterion(model(x), y).backward()
optimizer.step()
```
That repairs the running statistics. For the noise of small batches use `batchnorm.BatchRenorm`, synchronised
statistics, or a norm that does not look across examples.

## Fix safety
No automatic fix: the loop has to say where a step begins and ends.

## References
- ultralytics/yolov5#1630
- pytorch/pytorch#46516
- giotto-ai/giotto-deep#75
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.turns import Turn, Turns, differ, difference
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.nested import tensors_in
from batchnorm.records import Finding

ENOUGH = 16  # examples that are normalised together: from here on it is mostly the momentum that is off


class _Watcher(Watcher):
    """Looks whether a batch comes twice; what else it needs to know, `Turns` does."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.given: list[weakref.ref[Tensor]] = []  # since the last step
        self.repeated = self.found = False

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        batch = next(iter(tensors_in(arguments, keywords)), None)
        if batch is not None:
            self.repeated = self.repeated or any(given() is batch for given in self.given)
            self.given.append(weakref.ref(batch))
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        for path, turns in self.turns.add(run, seen):
            yield from self._judge(run, path, turns)

    def on_backward(self, run: TrainingRun, path: str) -> Iterator[Finding]:
        self.turns.reached(path)
        yield from ()

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        self.given.clear()
        yield from ()

    def too_short(self, run: TrainingRun) -> str:
        return self.turns.too_short

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        for path, turns in self.turns.end(run):
            yield from self._judge(run, path, turns)

    def _judge(self, run: TrainingRun, path: str, turns: list[Turn]) -> Iterator[Finding]:
        repeated, self.repeated = self.repeated, False
        times, examples = len(turns[0].calls), min(min(turn.examples) for turn in turns)
        own = all(turn.backward >= times for turn in turns)  # every call had a backward pass
        if self.found or repeated or not own or differ(difference(turns)):
            return
        self.found = True
        momentum = run.layers[path].momentum
        memory = "" if momentum is None else f", and its momentum of {momentum:.3g} works as {_works(momentum, times)}"
        yield RULE.found(
            path,
            f"{times} backward passes make one step, but BN normalises {examples} examples at a time{memory}",
            "`with bn.accumulate(model):` around the micro-batches of each step; BatchRenorm where they are small",
            severity="advice" if examples >= ENOUGH else None,
            step=run.step,
            micro_batches=times,
            examples=examples,
            momentum=-1.0 if momentum is None else momentum,
            effective_momentum=-1.0 if momentum is None else 1 - (1 - momentum) ** times,
        )


def _works(momentum: float, times: int) -> str:
    return f"{1 - (1 - momentum) ** times:.2g}"


RULE = Rule("BN304", "accumulation", "warning", __doc__, needs=("run",), watch=_Watcher)
