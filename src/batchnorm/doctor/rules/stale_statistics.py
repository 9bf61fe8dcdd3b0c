"""Running statistics that do not match the data: evaluation is another network than the one that was trained.

## What it does
Measures the exact statistics of the data at every BN layer (`batchnorm.calibrate`, on a copy) and compares them with
the running ones: by how many standard deviations the means are off, by which factor the variances, and what that does
to the outputs and, where labels are given and the outputs are scores of them (the largest is right more often than by
chance), to the accuracy in evaluation mode.

**With labels, accuracy decides**, however far the statistics are off: the finding is reported if exact statistics raise
accuracy by 2 points or more, and if chance would do so less than once in 1000 times (the exact test of McNemar, on the
examples that are right with one kind of statistics only). It is an error from 5 points on, otherwise a warning. Sixteen
examples are seldom enough; 600 are plenty for a large loss.

**Without labels**, the finding is a warning if mean or variance is off by more than a running average normally
fluctuates (0.25 standard deviations, a factor of 1.5) and by more than four sampling errors of the data, and the
outputs change by more than 5 %.

A difference that was measured and not reported is in ``findings.skipped`` with the reason: "held back: ...". Of
much data, some batches are used, spread over all: 512 examples, or 800 with labels. Layers that are as new (BN202) or
hold NaN (BN203) keep their statistics in the comparison, and are not reported here.

## Why is this bad?
In training BN uses the batch, in evaluation the running statistics. If those lag behind (a small momentum, few steps,
a learning rate that moves weights quickly, weights loaded or averaged or fine-tuned without their statistics, data from
another source), evaluation is wrong although the loss went down.

## Example
```python
model.train()
for x, y in ten_batches:  # momentum 0.01: 90 % of the running mean is still the initial 0
    step(model, x, y)
model.eval()
```

## Use instead
```python
model, calibrated = bn.calibrate(model, batches)
```

## Fix safety
Unsafe: it changes what the model computes in evaluation, which is its purpose; the data must be that of training.

## References
- pytorch/pytorch#4741
- discuss.pytorch.org/t/7146 (accuracy 76 % in training mode, 10 % in evaluation)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from batchnorm.doctor.gap import ERRORS, GAIN, MEAN, VARIANCE, Effect, distance, errors, few, limits
from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject, measured
from batchnorm.errors import BatchNormError
from batchnorm.records import Finding, Report

NEAR = 2.0  # sampling errors: a layer that is nearer to the data's statistics is as good as exact
Gap = tuple[Norm, tuple[float, float]]


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the running statistics with those of the data, layer by layer, and what they do to the outputs."""
    try:
        fresh, calibrated = subject.calibration
    except BatchNormError:  # no layer keeps running statistics that could be stale, or the data cannot tell
        return
    layers = dict(fresh.named_modules())
    gaps = [
        (norm, gap)
        for norm in subject.norms
        if norm.path in calibrated.report.paths and norm.is_measured  # else it is BN202's
        for gap in [distance(norm, layers[norm.path])]
        if not math.isnan(gap[0] + gap[1])  # else it is BN203's
    ]
    off = [(norm, gap) for norm, gap in gaps if _beyond(gap, limits(calibrated, norm.path))]
    real = [(norm, gap) for norm, gap in gaps if _beyond(gap, errors(calibrated, norm.path), ERRORS)]
    apart = [(norm, gap) for norm, gap in gaps if _beyond(gap, errors(calibrated, norm.path), NEAR)]
    if not off and not (apart and subject.labelled):
        _hold_within(subject, real)
        return
    effect = Effect(subject, _with_statistics(subject, fresh, gaps), calibrated)  # two more passes over the data
    if effect.gain is None and not off:
        _hold_within(subject, real)
    elif effect.matters:
        for norm, gap in off or real or [_farthest(apart)]:
            yield _found(norm, gap, layers[norm.path], effect)
    elif off or (effect.gain is not None and effect.gain >= GAIN):
        norm, gap = _farthest(off or apart)
        subject.held[RULE.code] = f"at {norm.path or 'the model'} {_words(gap)}; {effect.reservation}"


def _beyond(gap: tuple[float, float], limit: tuple[float, float], times: float = 1.0) -> bool:
    return gap[0] > times * limit[0] or gap[1] > times * limit[1]


def _farthest(gaps: Sequence[Gap]) -> Gap:
    return max(gaps, key=lambda one: one[1][0] / MEAN + one[1][1] / VARIANCE)


def _hold_within(subject: Subject, real: Sequence[Gap]) -> None:
    """Note the farthest of the layers that are off by no more than a running average normally fluctuates."""
    if real:
        norm, gap = _farthest(real)
        subject.held[RULE.code] = (
            f"at {norm.path or 'the model'} {_words(gap)}, which is within the fluctuation of a running average; "
            "batches with class labels would show whether accuracy is lost"
        )


def _with_statistics(subject: Subject, fresh: nn.Module, gaps: Sequence[Gap]) -> nn.Module:
    """Return the calibrated model with the old statistics in the layers of other rules: new ones, and poisoned ones."""
    judged = {norm.path for norm, _ in gaps}
    others = [norm for norm in subject.norms if norm.path not in judged and norm.running_mean is not None]
    if not others:
        return fresh
    fresh = copy.deepcopy(fresh)
    layers = dict(fresh.named_modules())
    for norm in others:
        for name in ("running_mean", "running_var"):
            layers[norm.path]._buffers[name] = copy.deepcopy(getattr(norm, name))
    return fresh


def _words(gap: tuple[float, float]) -> str:
    return (
        f"the running mean is {gap[0]:.2g} standard deviations off and the variance by a factor of "
        f"{math.exp(gap[1]):.2g} (root mean square over channels)"
    )


def _found(norm: Norm, gap: tuple[float, float], layer: Any, effect: Effect) -> Finding:
    return RULE.found(
        norm.path,
        f"{_words(gap)}; {effect.words}",
        "bn.calibrate(model, batches of the training data)",
        severity="error" if effect.grave else None,
        mean_off=gap[0],
        variance_log_ratio=gap[1],
        running_mean=few(norm.running_mean),
        fresh_mean=few(layer.running_mean),
        running_var=few(norm.running_var),
        fresh_var=few(layer.running_var),
        **effect.numbers,
    )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Recompute the statistics."""
    repair.model, done = measured(repair.model, repair.need("batches", RULE.code), repair.forward)
    return done.report


RULE = Rule(
    "BN201", "stale-statistics", "warning", __doc__, look, ("model", "data"), fix=fix, safety="unsafe", keeps=False
)
