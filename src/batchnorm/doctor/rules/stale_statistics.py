"""Running statistics that do not match the data: evaluation is another network than the one that was trained.

## What it does
Measures the exact statistics of the data at every BN layer (`batchnorm.calibrate`, on a copy) and compares them with
the running ones: by how many standard deviations the means are off, by which factor the variances, and what that does
to the outputs and, where labels are given, to the accuracy in evaluation mode. It speaks only if both are off by more
than a running average wanders anyway, and by more than the data can be wrong: sixteen examples cannot tell. It is
silent where exact statistics make the accuracy worse, where a layer is as new (BN202) or holds NaN (BN203).

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
from typing import Any

import torch
from torch import Tensor

from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject, measured
from batchnorm.errors import BatchNormError
from batchnorm.records import Finding, Report

# A running average over training wanders about the exact values by about this much, and does no harm.
MEAN, VARIANCE = 0.25, 0.4  # standard deviations; natural logarithm of the ratio (a factor of 1.5)
OUTPUT = 0.05  # of the outputs' deviation about their mean
ERRORS = 4.0  # so many standard errors of what the data says
ACCURACY = 0.05


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the running statistics with those of the data, layer by layer, and what they do to the outputs."""
    try:
        fresh, calibrated = subject.calibration
    except BatchNormError:  # no layer keeps running statistics that could be stale, or the data cannot tell
        return
    old, new = subject.outputs, subject.outputs_of(fresh)
    moved = moved_by(old, new)
    if not moved > OUTPUT:
        return
    outputs = f"with exact statistics {'the outputs have other shapes' if math.isinf(moved) else _change(moved)}"
    numbers: dict[str, Any] = {"samples": calibrated.samples}
    numbers |= {} if math.isinf(moved) else {"outputs_moved": moved}
    was, now = subject.accuracy(old), subject.accuracy(new)
    severity = None
    if was is not None and now is not None:
        # The accuracy of so many examples is known to about this much, whichever it is.
        noise = 2 * math.sqrt(0.5 / max(calibrated.samples, 1))
        if was - now > noise:  # then what the running statistics know is worth more than this data
            return
        outputs += f" and accuracy goes from {was:.1%} to {now:.1%}"
        numbers |= {"accuracy": was, "accuracy_calibrated": now}
        severity = "error" if now - was > max(ACCURACY, noise) else None
    layers = dict(fresh.named_modules())
    for norm in subject.norms:
        if norm.path not in calibrated.report.paths or norm.is_new:  # that one is BN202's
            continue
        gap = distance(norm, layers[norm.path])
        # One batch cannot say how sure it is, and few are not sure of that: as if an example were a single value.
        few = 1 / math.sqrt(max(calibrated.samples, 1))
        of_mean, of_var = (e if e < math.inf else 0.0 for e in calibrated.standard_errors[norm.path])
        sure_mean, sure_var = ERRORS * max(of_mean, few), ERRORS * max(of_var, math.sqrt(2) * few)
        if gap[0] > max(MEAN, sure_mean) or gap[1] > max(VARIANCE, sure_var):
            yield RULE.found(
                norm.path,
                f"its running mean is {gap[0]:.2g} standard deviations off and its variance by a factor of "
                f"{math.exp(min(gap[1], 700)):.2g} (root mean square over channels); {outputs}",
                "bn.calibrate(model, batches of the training data)",
                severity=severity,
                mean_off=gap[0],
                variance_log_ratio=gap[1],
                running_mean=_few(norm.running_mean),
                fresh_mean=_few(layers[norm.path].running_mean),
                running_var=_few(norm.running_var),
                fresh_var=_few(layers[norm.path].running_var),
                **numbers,
            )


def distance(norm: Norm, exact: Any) -> tuple[float, float]:
    """How far running statistics are from exact ones: the means, in standard deviations, and the variances, as the
    logarithm of their ratio; root mean square over channels. NaN where they are not finite (BN203).
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, var, running_mean, running_var = (
        t.detach().double().cpu() for t in (exact.running_mean, exact.running_var, norm.running_mean, norm.running_var)
    )
    off = (running_mean - mean) / (var + norm.eps).sqrt()
    apart = ((running_var + norm.eps) / (var + norm.eps)).log()
    return float(off.square().mean().sqrt()), float(apart.square().mean().sqrt())


def moved_by(old: list[list[Tensor]], new: list[list[Tensor]]) -> float:
    """By how much outputs differ, as a share of their deviation about their mean (root mean squares).

    Where there are no real numbers among them (labels, masks), the share of those that differ; infinity if they have
    other shapes; NaN if none is finite.
    """
    pairs = [(a, b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=False)]
    if any(len(x) != len(y) for x, y in zip(old, new, strict=True)) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    floats = [(a.double(), b.double()) for a, b in pairs if a.dtype.is_floating_point and a.numel()]
    if not floats:
        count = sum(a.numel() for a, _ in pairs)
        return sum(int((a != b).sum()) for a, b in pairs) / count if count else 0.0
    both = [(a, b, a.isfinite() & b.isfinite()) for a, b in floats]  # a batch with a NaN is not the statistics' fault
    real = [(a[fit], b[fit]) for a, b, fit in both]
    count = sum(b.numel() for _, b in real)
    if not count:
        return math.nan
    mean = sum(float(b.sum()) for _, b in real) / count
    spread = math.sqrt(sum(float((b - mean).square().sum()) for _, b in real) / count)
    apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in real) / count)
    scale = spread if spread > 1e-6 * abs(mean) else abs(mean)  # an output that does not vary has no deviation
    return apart / scale if scale > 0 else 0.0


def _change(moved: float) -> str:
    return f"the outputs change by {moved:.0%}" if moved < 10 else f"the outputs change by a factor of {moved:.0f}"


def _few(values: Tensor | None) -> list[float]:
    assert values is not None
    return [float(f"{v:.4g}") for v in values.detach().flatten()[:4].tolist()]


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Measure the statistics anew."""
    batches = patient.need("batches", RULE.code)
    with torch.no_grad():
        patient.model, done = measured(patient.model, batches, patient.forward)
    return done.report


RULE = Rule(
    "BN201", "stale-statistics", "warning", __doc__, look, ("model", "data"), fix=fix, safety="unsafe", keeps=False
)
