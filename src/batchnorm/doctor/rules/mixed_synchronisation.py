"""Plain layers beside synchronised ones: a part of the model sees the batch of all ranks, the rest its own.

## What it does
Finds BN layers that train on the batch of their own process in a model that also has synchronised layers (torch's
SyncBatchNorm or ours). While training runs, it reports those that moved their statistics in the same steps as
synchronised layers did. Layers that are frozen, in evaluation mode inside a model that trains, or without running
statistics are not reported.

## Why is this bad?
Most such models are an accident: a head was added after ``convert_sync_batchnorm``, which converts what it finds; a
layer is of a class that it does not know; a part was loaded from another package. The plain layers normalise with the
few examples of one process, which is what the conversion was to prevent, and their running statistics differ from rank
to rank (BN401), so that what is saved depends on who saves it.

## Example
```python
backbone = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)
model = nn.Sequential(backbone, nn.Linear(512, 64), nn.BatchNorm1d(64))  # plain
```

## Use instead
```python
model = nn.Sequential(backbone, nn.Linear(512, 64), nn.BatchNorm1d(64))
model, report = bn.convert(model, "sync")  # the whole model, last; `report` names what is left as it is
```

## Fix safety
No automatic fix: whether a layer is to wait for the other ranks in every step is for you to say.

## References
- torch.nn.SyncBatchNorm.convert_sync_batchnorm, which converts the layers that are there when it is called
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.layers.sync import Synchronised
from batchnorm.records import Finding
from batchnorm.transforms.freeze import is_frozen

STEPS = 2  # in which both kinds ran


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the kinds of the layers that are to train."""
    trains = subject.net.training
    moving = [
        (path, layer)
        for path, layer in subject.layers
        if not is_frozen(layer) and uses(layer, training=layer.training if trains else True) == (True, True)
    ]
    synchronised = [path for path, layer in moving if _synchronised(layer)]
    yield from _mixed([path for path, layer in moving if not _synchronised(layer)], synchronised)


def _synchronised(layer: _BatchNorm) -> bool:
    """Whether a layer is made for the batch of all ranks, whether there are any now or not."""
    return isinstance(layer, (nn.SyncBatchNorm, Synchronised))


def _mixed(plain: Sequence[str], synchronised: Sequence[str], step: int | None = None) -> Iterator[Finding]:
    if not synchronised:
        return
    for path in plain:
        yield RULE.found(
            path,
            f"it trains on the batch of its own process, and {len(synchronised)} other layers, such as "
            f"{synchronised[0] or 'the model'}, on that of all ranks",
            'bn.convert(model, "sync") converts the whole model, after the last layer was added',
            step=step,
            plain=len(plain),
            synchronised=len(synchronised),
        )


class _Watcher(Watcher):
    """Collects the layers that move their statistics for gradients."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}  # since the last step: whether each layer is synchronised
        self.steps = 0

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if self.steps < STEPS and seen.gradients and seen.updates and seen.from_batch and not seen.recomputed:
            self.seen[seen.path] = _synchronised(seen.layer)
        yield from ()

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        kinds, self.seen = self.seen, {}
        if len(set(kinds.values())) == 2:
            self.steps += 1
            if self.steps == STEPS:
                sync = [path for path, shares in kinds.items() if shares]
                yield from _mixed([path for path in kinds if path not in sync], sync, run.step)


RULE = Rule("BN404", "mixed-synchronisation", "warning", __doc__, look, ("model",), watch=_Watcher)
