"""A model that is exported while BN uses the statistics of the batch.

## What it does
With ``bn.check(model, purpose="export")`` it finds BN layers that would normalise
with the batch: in training mode, or in evaluation mode but without running statistics. It also finds the training
arithmetic in a program that ``torch.export`` has written already, and, under ``bn.monitor``, sees the export happen.

## Why is this bad?
The exported network gives an example another answer in other company: at batch size 1 a classifier answers with
constants, accuracy falls, and exporters either warn, fail, or write operators that no runtime has. Once exported,
``eval()`` does not reach it any more.

## Example
```python
torch.onnx.export(model, x, "model.onnx")  # without model.eval()
```

## Use instead
```python
model.eval()
bn.export(model, x, "model.onnx")  # refuses training mode, folds BN, compares what was written
```

## Fix safety
Safe: the model is put into evaluation mode, which is what an export is for. Layers without running statistics need
some first: ``track_running_stats=True``, then `batchnorm.calibrate`.

## References
- pytorch/pytorch#75252
- openvinotoolkit/anomalib#2909
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.records import Change, Finding, Report

REPAIR = "call model.eval() before the export; bn.export(model, example, path) makes sure, and folds BN"


def look(subject: Subject) -> Iterator[Finding]:
    """Look into programs that were exported, and at the modes of what is about to be."""
    for path, module in subject.net.named_modules():
        if isinstance(module, GraphModule):
            training = [node.name for node in module.graph.nodes if _trains(node)]
            if training:
                yield RULE.found(
                    path,
                    f"it was exported in training mode: {len(training)} BN operators use the statistics of the batch "
                    f"({training[0]} is the first), and eval() does not change that",
                    "export it again after model.eval()",
                    severity="warning" if not subject.purpose else None,
                    fix="none",
                    operators=len(training),
                )
    if subject.purpose != "export":
        return
    now = [(path, layer) for path, layer in subject.layers if uses(layer)[0]]
    always = [path for path, layer in now if _in_evaluation(layer)]
    if len(now) > len(always):
        moving = sum(uses(layer)[1] for _, layer in now)
        yield RULE.found(
            "",
            f"{len(now) - len(always)} of its {len(subject.layers)} BN layers are in training mode: they would use the "
            f"statistics of the batch, and {moving or 'none'} would move the running ones",
            REPAIR,
            training=len(now) - len(always),
            layers=len(subject.layers),
            moving=moving,
        )
    for path in always:
        yield RULE.found(
            path,
            "it normalises with the statistics of the batch in evaluation mode too, so that the output for an "
            "example depends on its batch",
            "give it running statistics (track_running_stats=True), bn.calibrate(model, batches), then export",
            fix="none",
            channels=dict(subject.layers)[path].num_features,
        )


def _in_evaluation(layer: _BatchNorm) -> bool:
    """Whether a layer would use the batch after eval(), too."""
    mode = layer.training
    try:
        layer.training = False
        return uses(layer)[0]
    finally:
        layer.training = mode


def _trains(node: Any) -> bool:
    """Whether a node of an exported program is BN with the statistics of the batch."""
    if node.op != "call_function" or "batch_norm" not in str(node.target):
        return False
    if "batch_norm_with_update" in str(node.target):
        return True
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "training" in names and len(node.args) > names.index("training"):
        return node.args[names.index("training")] is True
    return node.kwargs.get("training") is True


class _Watcher(Watcher):
    def on_export(self, run: TrainingRun, path: str, layer: _BatchNorm) -> Iterator[Finding]:
        if uses(layer)[0]:
            how = "is in training mode" if layer.training else "keeps no running statistics"
            yield RULE.found(
                path,
                f"the model is being exported while it {how}: it will use the statistics of each batch",
                REPAIR,
                step=run.step,
                call=run.call,
            )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Put the model into evaluation mode."""
    repair.model.eval()
    return Report((Change("", "mode", "training", "evaluation"),))


RULE = Rule(
    "BN501", "train-mode-export", "error", __doc__, look, ("model",), watch=_Watcher, fix=fix, safety="safe"
)  # fmt: skip
