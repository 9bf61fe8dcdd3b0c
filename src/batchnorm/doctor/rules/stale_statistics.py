"""Running statistics that do not match the data: evaluation is another network than the one that was trained.

## What it does
Measures the exact statistics of the data at every BN layer (`batchnorm.calibrate`, on a copy) and compares them with
the running ones: by how many standard deviations the means are off, by which factor the variances, and what that does
to the outputs and, where labels are given and the outputs are scores of them (the largest is right more often than by
chance), to the accuracy in evaluation mode. It speaks only if both are off by more
than a running average wanders anyway, and by more than the data can be wrong: sixteen examples cannot tell. Of much
data, some batches are looked at, spread over all: 512 examples, or 800 with labels, are enough to be sure. It is
silent where exact statistics make the accuracy worse, where a layer is as new (BN202) or holds NaN (BN203). Where the
labels show that accuracy is lost, it is an error; otherwise a warning.

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

import math
from collections.abc import Iterator, Sequence

from batchnorm.doctor.gap import Effect, distance, few, limits
from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject, measured
from batchnorm.errors import BatchNormError
from batchnorm.records import Finding, Report


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the running statistics with those of the data, layer by layer, and what they do to the outputs."""
    try:
        fresh, calibrated = subject.calibration
    except BatchNormError:  # no layer keeps running statistics that could be stale, or the data cannot tell
        return
    layers = dict(fresh.named_modules())
    off = [
        (norm, gap)
        for norm in subject.norms
        if norm.path in calibrated.report.paths and norm.is_measured  # else it is BN202's
        for gap, far in [(distance(norm, layers[norm.path]), limits(calibrated, norm.path))]
        if gap[0] > far[0] or gap[1] > far[1]
    ]
    if not off:
        return
    effect = Effect(subject, fresh, calibrated)  # which takes two more passes over the data
    if not effect.matters:
        return
    for norm, gap in off:
        yield RULE.found(
            norm.path,
            f"its running mean is {gap[0]:.2g} standard deviations off and its variance by a factor of "
            f"{math.exp(gap[1]):.2g} (root mean square over channels); {effect.words}",
            "bn.calibrate(model, batches of the training data)",
            severity="error" if effect.grave else None,
            mean_off=gap[0],
            variance_log_ratio=gap[1],
            running_mean=few(norm.running_mean),
            fresh_mean=few(layers[norm.path].running_mean),
            running_var=few(norm.running_var),
            fresh_var=few(layers[norm.path].running_var),
            **effect.numbers,
        )


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Measure the statistics anew."""
    patient.model, done = measured(patient.model, patient.need("batches", RULE.code), patient.forward)
    return done.report


RULE = Rule(
    "BN201", "stale-statistics", "warning", __doc__, look, ("model", "data"), fix=fix, safety="unsafe", keeps=False
)
