"""Running statistics that do not match the data: evaluation is another network than the one that was trained.

## What it does
Measures the exact statistics of the data at every BN layer (`batchnorm.calibrate`, on a copy) and compares them with
the running ones: by how many standard deviations the means are off, by which factor the variances, and what that does
to the outputs and, where labels are given, to the accuracy in evaluation mode.

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

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.errors import BatchNormError
from batchnorm.records import Finding, Report
from batchnorm.transforms.calibrate import calibrate

# A running average over training wanders about the exact values by about this much, and does no harm.
MEAN, VARIANCE = 0.25, 0.4  # standard deviations; natural logarithm of the ratio (a factor of 1.5)
OUTPUT = 0.05  # of the outputs' root mean square
ERRORS = 4.0  # so many standard errors of what the data says


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the running statistics with those of the data, layer by layer, and what they do to the outputs."""
    try:
        fresh, calibrated = subject.calibration
    except BatchNormError:  # no layer keeps running statistics that could be stale
        return
    old, new = subject.outputs, subject.outputs_of(fresh)
    moved = _relative(old, new)
    if not moved > OUTPUT:
        return
    accuracies = subject.accuracy(old), subject.accuracy(new)
    outputs = f"with exact statistics the outputs change by {moved:.0%}"
    numbers: dict[str, Any] = {"outputs_moved": moved}
    severity = None
    if accuracies[0] is not None and accuracies[1] is not None:
        outputs += f" and accuracy goes from {accuracies[0]:.1%} to {accuracies[1]:.1%}"
        numbers |= {"accuracy": accuracies[0], "accuracy_calibrated": accuracies[1]}
        severity = "error" if accuracies[1] - accuracies[0] > 0.05 else None
    layers = dict(fresh.named_modules())
    for norm in subject.norms:
        if norm.path not in calibrated.standard_errors or norm.running_mean is None or norm.running_var is None:
            continue
        exact = layers[norm.path]
        of_mean, of_var = (e if e < float("inf") else 0.1 for e in calibrated.standard_errors[norm.path])
        mean, var, running_mean, running_var = (
            t.detach().double() for t in (exact.running_mean, exact.running_var, norm.running_mean, norm.running_var)
        )  # fmt: skip
        off = float(((running_mean - mean) / (var + norm.eps).sqrt()).square().mean().sqrt())
        apart = float(((running_var + norm.eps) / (var + norm.eps)).log().square().mean().sqrt())
        if off > max(MEAN, ERRORS * of_mean) or apart > max(VARIANCE, ERRORS * of_var):
            yield RULE.found(
                norm.path,
                f"its running mean is {off:.2g} standard deviations off and its variance by a factor of "
                f"{torch.tensor(apart).exp():.2g} (root mean square over channels); {outputs}",
                "bn.calibrate(model, batches of the training data)",
                severity=severity,
                mean_off=off,
                variance_log_ratio=apart,
                running_mean=_few(running_mean),
                fresh_mean=_few(mean),
                running_var=_few(running_var),
                fresh_var=_few(var),
                samples=calibrated.samples,
                **numbers,
            )


def _relative(old: list[list[Tensor]], new: list[list[Tensor]]) -> float:
    """By how much real outputs differ, as a share of their deviation about their mean (root mean squares)."""
    pairs = [(a, b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    real = [(a.double().flatten(), b.double().flatten()) for a, b in pairs if a.dtype.is_floating_point]
    if not real:
        return 0.0
    a, b = (torch.cat(side) for side in zip(*real, strict=True))
    spread = b.std() if len(b) > 1 and float(b.std()) > 0 else b.abs().mean()
    return float((a - b).square().mean().sqrt() / spread) if float(spread) > 0 else 0.0


def _few(values: Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in values.flatten()[:4].tolist()]


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Measure the statistics anew."""
    batches = patient.need("batches", RULE.code)
    patient.model, done = calibrate(patient.model, batches, forward=patient.forward, progress=False, inplace=True)
    return done.report


RULE = Rule(
    "BN201", "stale-statistics", "warning", __doc__, look, ("model", "data"), fix=fix, safety="unsafe", keeps=False
)
