"""Flags that contradict each other: ``track_running_stats``, the buffers and the switches say different things.

## What it does
Compares what a layer's flags say with what it has: ``track_running_stats`` set after the layer was built, buffers that
were taken away, a momentum of zero, switches that ask for statistics which are not there. In a layer that was built
without running statistics it shows, where an example is given, that evaluation depends on the batch.

While training runs, it reports layers whose running statistics moved, and then stand still for 3 steps in which they
still normalise with the batch: the momentum was scheduled to 0 (or below 1e-5), or ``track_running_stats`` was turned
off. A layer that is updated in one pass of a step and not in another (SAM, a GAN's discriminator) is not reported, nor
is one that was frozen, or switched with ``update=False``.

## Why is this bad?
``track_running_stats`` is read when the layer is built: it decides whether there are buffers. Setting it to False later
does not take them away: training uses the batch and learns nothing, evaluation still uses the old buffers, which
fits neither of the two things one may have meant (freeze the layer; use the batch always). One buffer without the other
raises. A layer without buffers computes batch statistics in evaluation too: an example's output depends on its
neighbours, and a single example of one value per channel raises "Expected more than 1 value per channel when training"
although it does not train.

A momentum of 0 while the weights learn on has the same effect as a forgotten update: evaluation uses the statistics of
weights that are gone. Let a schedule end at a small number such as 0.001, or calibrate at the end.

## Example
```python
for layer in model.modules():
    if isinstance(layer, nn.BatchNorm2d):
        layer.track_running_stats = False
```

## Use instead
```python
model, report = bn.freeze(model)  # running statistics always; nothing learns
layer = bn.BatchNorm2d(64, update=False)  # the batch's in training, but keep the running ones
layer = bn.BatchNorm2d(64, statistics="batch")  # the batch's, always
```

## Fix safety
Safe: the layer computes what it does now, in training and in evaluation, with explicit switches.
Whether that is what was meant is for you to say. Where nothing sensible happens now (one buffer of two), there is no
fix.

## References
- pytorch/pytorch#20967
- pytorch/pytorch#37823
- pytorch/pytorch#44415
- pytorch/pytorch#156051
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.preserve import in_mode
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.freeze import _OURS

STILL = 1e-5  # a momentum at which running statistics stand still: an average of 200000 batches
STEPS = 3  # in a row, of the optimizers of a layer
_SWITCHABLE = tuple(kind for kind in _OURS if kind is not nn.SyncBatchNorm)


def look(subject: Subject) -> Iterator[Finding]:
    """Compare flags, buffers and switches of every layer that keeps statistics."""
    for path, layer in subject.net.named_modules():
        if isinstance(layer, _NormBase):
            yield from _of(path, layer, subject)


def _of(path: str, layer: _NormBase, subject: Subject) -> Iterator[Finding]:
    has = [layer.running_mean is not None, layer.running_var is not None]
    tracks = bool(layer.track_running_stats)
    numbers: dict[str, Any] = {"track_running_stats": tracks, "buffers": sum(has), "training": layer.training}
    batch = isinstance(layer, _BatchNorm)
    switched = isinstance(layer, _BatchNormBase) and (layer.statistics != "auto" or layer.update is not None)
    if sum(has) == 1:
        there, missing = ("running_mean", "running_var") if has[0] else ("running_var", "running_mean")
        yield RULE.found(
            path, f"it has {there} but no {missing}: evaluation raises",
            "give it both (bn.calibrate measures them) or neither", severity="error", fix="none", **numbers,
        )  # fmt: skip
    elif isinstance(layer, _BatchNormBase) and not all(has) and layer.statistics == "running":
        yield RULE.found(
            path, "statistics='running', but it has no running statistics: every call raises",
            "build it with track_running_stats=True, and bn.calibrate it", severity="error", fix="none", **numbers,
        )  # fmt: skip
    elif isinstance(layer, _BatchNormBase) and not all(has) and layer.update:
        yield RULE.found(
            path, "update=True, but it has no running statistics to update",
            "update=None, or build it with track_running_stats=True", **numbers,
        )  # fmt: skip
    elif batch and all(has) and not tracks and not switched:
        yield RULE.found(
            path,
            "track_running_stats is False, but its buffers are there: training uses the batch and learns no "
            f"statistics, evaluation uses the buffers{_off(subject, layer, numbers)}",
            "bn.freeze(model), or a bn.BatchNorm with update=False or statistics='batch': say which is meant",
            fix="safe" if _switchable(layer) else "none",
            **numbers,
        )
    elif batch and tracks and not any(has):
        yield RULE.found(
            path, "track_running_stats is True, but it has no buffers: evaluation uses the batch's statistics",
            "track_running_stats=False says what it does; bn.calibrate needs a layer that was built with it", **numbers,
        )  # fmt: skip
    elif not batch and tracks and not any(has):  # an InstanceNorm asks only its flag
        yield RULE.found(
            path, "track_running_stats is True, but it has no buffers: evaluation raises",
            "track_running_stats=False", severity="error", **numbers,
        )  # fmt: skip
    elif batch and all(has) and layer.momentum == 0.0 and not switched:
        began = _as_built(layer)
        yield RULE.found(
            path,
            "momentum is 0: training uses the batch, evaluation the running statistics, which never move"
            + (" and are still 0 and 1" if began else ""),
            "bn.freeze(model), or a bn.BatchNorm with update=False",
            severity="warning" if began else "advice",
            fix="safe" if _switchable(layer) else "none",
            momentum=0.0,
            **numbers,
        )
    elif batch and not tracks and not any(has):
        yield from _untracked(path, layer, subject, numbers)


@dataclass
class _Followed:
    """A layer whose statistics moved in this run."""

    momentum: float | None
    turn: int = -1
    moved: bool = True  # in this turn
    steps: int = 0  # turns in a row in which it stood still


class _Watcher(Watcher):
    """Counts the steps in which a layer uses the batch and its statistics, which moved before, stand still."""

    def __init__(self) -> None:
        self.layers: dict[str, _Followed] = {}

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        layer, followed = seen.layer, self.layers.get(seen.path)
        if seen.recomputed or not seen.from_batch or not seen.gradients or not layer.training:
            return
        moves = seen.updates and (layer.momentum is None or abs(layer.momentum) > STILL)
        if followed is None:
            if moves:
                self.layers[seen.path] = _Followed(layer.momentum, seen.turn)
            return
        if seen.turn != followed.turn:
            followed.steps = 0 if followed.moved else followed.steps + 1
            followed.turn, followed.moved = seen.turn, False
            if followed.steps == STEPS:
                yield _stands_still(run, seen.path, layer, followed)
        if moves:
            followed.moved, followed.momentum = True, layer.momentum
        elif isinstance(layer, _BatchNormBase) and layer.update is False:
            followed.moved = True  # it was switched off on purpose


def _stands_still(run: TrainingRun, path: str, layer: _BatchNorm, followed: _Followed) -> Finding:
    before = "None" if followed.momentum is None else f"{followed.momentum:g}"
    why = (
        f"its momentum went from {before} to {layer.momentum:g}"
        if layer.track_running_stats and layer.momentum is not None
        else "its track_running_stats was turned off"
    )
    return RULE.found(
        path,
        f"{why} while it trains: it normalises with the batch, and its running statistics have stood still for "
        f"{STEPS} steps",
        "let the schedule end at 0.001, or bn.calibrate(model, batches) at the end; bn.freeze(model) to use the "
        "running statistics in training as well",
        fix="none", step=run.step, call=run.call, steps=STEPS, track_running_stats=bool(layer.track_running_stats),
        momentum=-1.0 if layer.momentum is None else float(layer.momentum),
        momentum_before=-1.0 if followed.momentum is None else float(followed.momentum),
    )  # fmt: skip


def _switchable(layer: _NormBase) -> bool:
    return isinstance(layer, _BatchNormBase) or type(layer) in _SWITCHABLE


def _as_built(layer: _NormBase) -> bool:
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool((mean == 0).all()) and bool((var == 1).all())


def _inputs(subject: Subject, layer: _NormBase) -> list[Tensor]:
    """What the layer is given in evaluation mode."""
    seen: list[Tensor] = []
    if subject.example is not None:
        wanted = lambda module: module is layer  # noqa: E731
        with subject.looking(lambda _, __, given, ___: seen.extend(given[:1]), wanted) as model:
            subject.run(in_mode(model, False), subject.example)
    return [x for x in seen if isinstance(x, Tensor) and x.dim() > 1 and not x.is_meta]


def _off(subject: Subject, layer: _NormBase, numbers: dict[str, Any]) -> str:
    """By how much the buffers and the batch differ, in words, where an example is given."""
    mean, var = layer.running_mean, layer.running_var
    inputs = _inputs(subject, layer)
    if not inputs or mean is None or var is None or mean.dim() != 1:
        return ""
    x = inputs[0].double().transpose(0, 1).flatten(1)
    scale = (var.double() + layer.eps).sqrt()
    numbers["mean_off"] = off = float(((x.mean(1) - mean.double()) / scale).square().mean().sqrt())
    return f", whose mean is {off:.2g} standard deviations from the example's"


def _untracked(path: str, layer: _NormBase, subject: Subject, numbers: dict[str, Any]) -> Iterator[Finding]:
    """A layer built without statistics, of which a single example is one value per channel."""
    if isinstance(layer, _BatchNormBase) and layer.statistics == "batch":
        return  # set on purpose
    for x in _inputs(subject, layer):
        if x.shape[0] > 2 and x.shape[2:].numel() == 1:
            with torch.no_grad():
                whole, part = (nn.functional.batch_norm(part, None, None, training=True) for part in (x, x[:2]))
            moved = float((whole[:2] - part).double().square().mean().sqrt())
            yield RULE.found(
                path,
                f"evaluation uses the batch's statistics: two of the {len(x)} examples alone change by {moved:.2g} "
                "standard deviations, and one alone raises",
                "build it with track_running_stats=True, or say statistics='batch' (bn.BatchNorm1d) if it is meant",
                severity="advice",
                fix="none",
                moved=moved,
                **numbers,
            )
            return


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Say with switches what the layers do now."""
    changes: list[Change] = []
    modules = dict(repair.model.named_modules())
    for path in dict.fromkeys(finding.path for finding in findings):
        layer = modules[path]
        assert isinstance(layer, _NormBase)
        if layer.running_mean is None:
            if isinstance(layer, _BatchNormBase) and layer.update:
                changes.append(Change(path, "update", layer.update, None))
                layer.update = None
            else:
                changes.append(Change(path, "track_running_stats", True, False))
                layer.track_running_stats = False
            continue
        if not isinstance(layer, _BatchNormBase):
            ours = _OURS[type(layer)]
            changes.append(Change(path, "class", f"torch.nn.{type(layer).__name__}", f"batchnorm.{ours.__name__}"))
            layer.__class__ = ours
        assert isinstance(layer, _BatchNormBase)
        changes.append(Change(path, "update", layer.update, False))
        layer.track_running_stats, layer.update = True, False
        layer.momentum = layer.momentum or 0.1
    return Report(tuple(changes))


RULE = Rule(
    "BN103", "contradictory-flags", "warning", __doc__, look, ("model",), watch=_Watcher, fix=fix, safety="safe"
)
