"""torch's SyncBatchNorm on a CPU: it raises as soon as several processes train.

## What it does
Finds torch's ``SyncBatchNorm`` layers whose tensors lie on a CPU, and tries one of them on a small batch.

## Why is this bad?
torch's layer exchanges its statistics with CUDA collectives only. On a CPU it raises "SyncBatchNorm expected input
tensor to be on GPU": in training once a process group is initialised, and in older versions of torch always, in
evaluation too, which is how a model that was trained on GPUs fails on a laptop.

## Example
```python
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # trained on GPUs
model.cpu()(x)
```

## Use instead
```python
model, report = bn.convert(model, "sync")  # ours, which runs over gloo as well
model, report = bn.convert(model, "batch")  # plain layers, for one process
```

## Fix safety
Safe: the layer becomes our SyncBatchNorm, with the same parameters, buffers and process group; alone it is plain BN.

## References
- open-mmlab/mmsegmentation#387
- ultralytics/yolov5#1018
- takuseno/d3rlpy#439
- pytorch/pytorch#78078
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.convert import convert


def look(subject: Subject) -> Iterator[Finding]:
    """Find the layers and try each on two examples, in training mode."""
    for path, layer in subject.layers:
        if not isinstance(layer, nn.SyncBatchNorm):
            continue
        tensors = [t for t in (layer.weight, layer.bias, layer.running_mean) if t is not None]
        if not tensors or any(t.device.type != "cpu" for t in tensors):
            continue
        raised = _tried(layer)
        gpus = torch.cuda.is_available()
        here = f"it raises here: {raised}" if raised else "it runs here only because there is no process group"
        yield RULE.found(
            path,
            f"it is torch's SyncBatchNorm on a CPU, where training in several processes raises; {here}",
            "bn.convert(model, 'sync') gives layers that run on CPUs, bn.convert(model, 'batch') plain ones",
            # A model is built on the CPU before it goes to a GPU: where there is one, that may be all there is to it.
            severity="error" if raised else "advice" if gpus else "warning",
            fix="safe" if type(layer) is nn.SyncBatchNorm else "none",
            raises=bool(raised),
            gpus=torch.cuda.device_count() if gpus else 0,
        )


def _tried(layer: nn.SyncBatchNorm) -> str:
    """The error that a copy of the layer raises, before it exchanges anything."""
    group: Any = vars(layer).get("process_group")
    twin = copy.deepcopy(layer, {id(group): group} if group is not None else {}).train()
    like = next(t for t in (layer.weight, layer.bias, layer.running_mean) if t is not None)
    try:
        with torch.no_grad():
            twin(torch.zeros(2, layer.num_features, 2, 2, dtype=like.dtype))
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:120]
    return ""


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Change the layers to our class."""
    modules = dict(repair.model.named_modules())
    changes: list[Change] = []
    left: dict[str, str] = {}
    for path in dict.fromkeys(finding.path for finding in findings):
        layer: Any = modules[path]
        _, report = convert(layer, "sync", inplace=True)
        layer._path = path  # whom it is called by where a rank is missing
        changes += [Change(path, c.what, c.before, c.after) for c in report.changes]
        if report.left:
            left[path] = next(iter(report.left.values()))
    return Report(tuple(changes), left)


RULE = Rule("BN106", "sync-on-cpu", "warning", __doc__, look, ("model",), fix=fix, safety="safe")
