"""A batch with one value per channel: training stops at the end of an epoch.

## What it does
Computes from the DataLoader whether a batch of one example is left over at the end of an epoch, and from the example's
run which BN layers would then have one value per channel: after a linear layer, or on a map of one pixel. While
training runs, it sees such a batch before the layer does, and names it.

## Why is this bad?
One value is its own mean and has no variance; normalised it would be 0, whatever it was. Torch raises ``Expected more
than 1 value per channel when training``, after the rest of an epoch has gone well, and only for some sizes of dataset.

## Example
```python
loader = DataLoader(dataset, batch_size=32)  # of 1,025 examples: the last batch has one
```

## Use instead
```python
loader = DataLoader(dataset, batch_size=32, drop_last=True)
bn.BatchNorm1d(64, one_value="running")  # or: such a batch is normalised with the running statistics
```

## Fix safety
Safe: torch's layers become ours with ``one_value="running"``. Nothing changes for batches of several values; the
batch that raised is normalised with the running statistics, and they learn nothing from it.

## References
- pytorch/pytorch#4534
- fastai/fastai#1352
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader

from batchnorm.doctor.repair import PLAIN, Repair, to_ours
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import TrainingRun, Watcher
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.switches import uses
from batchnorm.layers.sync import Synchronised
from batchnorm.nested import tensors_in
from batchnorm.records import Change, Finding, Report

REPAIR = 'drop_last=True in the DataLoader, or bn.BatchNorm1d/2d/3d(..., one_value="running")'


def look(subject: Subject) -> Iterator[Finding]:
    """Find whether a last batch of one example occurs, and the layers that would get one value per channel."""
    assert subject.loader is not None
    counted = _last(subject.loader)
    if counted is None:
        return
    examples, size, last = counted
    if last != 1:
        return
    given = tensors_in(subject.example)
    batch = given[0].shape[0] if given and given[0].dim() else 0
    if not batch:
        return
    for path, layer in subject.layers:
        if not _refuses(layer):
            continue
        for call in subject.graph.of(layer):
            value = call.arguments.get("0", call.arguments.get("input"))
            shape = () if value is None else subject.graph.values[value].shape
            values = shape[0] * _positions(shape) if len(shape) > 1 else 0
            if values != batch:  # then an example has another number than one value of a channel
                continue
            what = "every batch has one example" if size == 1 else f"the last of {examples} examples is a batch of one"
            yield RULE.found(
                path,
                f"{what}, of which it gets one value per channel: it will raise in training",
                REPAIR,
                fix=None if isinstance(layer, _BatchNormBase) or type(layer) in PLAIN else "none",
                examples=examples,
                batch_size=size,
                shape=[1, *shape[1:]],
            )
            break


def _last(loader: DataLoader[Any]) -> tuple[int, int, int] | None:
    """How many examples there are, how large batches are, and how large the last one is; None if unknown."""
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler or loader.batch_size is None or loader.drop_last:
        return None
    try:
        examples = len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:  # a stream
        return None
    return examples, loader.batch_size, examples % loader.batch_size or loader.batch_size


def _positions(shape: Sequence[int]) -> int:
    count = 1
    for size in shape[2:]:
        count *= size
    return count


def _refuses(layer: _BatchNorm) -> bool:
    """Whether a layer, as it is, would raise if it got one value per channel."""
    if not uses(layer)[0] or isinstance(layer, nn.SyncBatchNorm):
        return False
    if isinstance(layer, Synchronised) and layer._shares():
        return False  # the other ranks have values too
    tracked = layer.running_mean is not None
    return not (isinstance(layer, _BatchNormBase) and layer.one_value == "running" and tracked)


class _Watcher(Watcher):
    """Report before the layer runs: torch's layer raises, and a forward hook would not be called."""

    def on_input(
        self, run: TrainingRun, path: str, layer: _BatchNorm, x: Tensor, mask: Tensor | None
    ) -> Iterator[Finding]:  # fmt: skip
        if x.dim() < 2 or x.shape[0] * _positions(x.shape) != 1 or not _refuses(layer):
            return
        yield RULE.found(
            path,
            f"call {run.call} of the model gives it one value per channel (shape {list(x.shape)}): it raises",
            REPAIR,
            step=run.step,
            call=run.call,
            shape=list(x.shape),
        )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Make the layers use their running statistics for such a batch."""
    modules = dict(repair.model.named_modules(remove_duplicate=False))
    changes: list[Change] = []
    left: dict[str, str] = {}
    for path in dict.fromkeys(finding.path for finding in findings):
        layer = modules[path]
        changed = to_ours(path, layer)
        if isinstance(changed, Change):
            changes.append(changed)
        if not isinstance(layer, _BatchNormBase):
            left[path] = str(changed)
        elif layer.running_mean is None:
            left[path] = "it keeps no running statistics that could take the batch's place"
        else:
            changes.append(Change(path, "one_value", layer.one_value, "running"))
            layer.one_value = "running"
    return Report(tuple(changes), left)


RULE = Rule(
    "BN204", "single-value", "error", __doc__, look, ("model", "loader", "example"), watch=_Watcher, fix=fix,
    safety="safe",
)  # fmt: skip
