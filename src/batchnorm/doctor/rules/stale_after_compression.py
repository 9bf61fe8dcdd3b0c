"""Statistics that fit the model before it was pruned or quantised, and not the one it has become.

## What it does
Given the model as it was (``before=``) and data, it measures the exact statistics of both. A BN layer whose running
statistics fitted then and do not fit now is named, with what exact ones would do to the outputs and the accuracy.
Where labels are given, it is reported only if exact statistics raise accuracy, as in BN201; if not,
``findings.skipped`` has the reason.

## Why is this bad?
Pruning, quantising and merging change what every BN layer is given, and the running statistics are still those of the
network before. Most of the accuracy that is lost is lost here, and costs no training to get back: one network fell to
14.0 % and had 65.2 % after its statistics had been recomputed.

## Example
```python
prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.7)
evaluate(model)
```

## Use instead
```python
prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.7)
model, calibrated = bn.calibrate(model, batches)
evaluate(model)
```

## Fix safety
Unsafe: it changes what the model computes in evaluation, which is its purpose; the data must be that of training.

## References
- openvinotoolkit/nncf#41 (14.0 % -> 65.2 %)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.gap import Effect, distance, few, limits
from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject, measured
from batchnorm.errors import BatchNormError
from batchnorm.records import Finding, Report


def look(subject: Subject) -> Iterator[Finding]:
    """Recompute the statistics of both models, and compare each with its own."""
    assert subject.before is not None
    try:
        now, calibrated = subject.calibration
        then, calibrated_then = subject.calibrated(subject.before)
    except BatchNormError:
        return
    layers, layers_then, were = (dict(m.named_modules()) for m in (now, then, subject.before))
    off: list[tuple[Norm, tuple[float, float], tuple[float, float]]] = []
    for norm in subject.norms:
        path, was = norm.path, were.get(norm.path)
        if not isinstance(was, _BatchNorm) or not {path} <= {*calibrated.report.paths} & {
            *calibrated_then.report.paths
        }:
            continue
        own = Norm(path, None, None, was.running_mean, was.running_var, None, was)
        if norm.is_new or own.is_new:
            continue
        gap, far = distance(norm, layers[path]), limits(calibrated, path)
        gap_then, far_then = distance(own, layers_then[path]), limits(calibrated_then, path)
        fitted = gap_then[0] <= far_then[0] and gap_then[1] <= far_then[1]
        if fitted and (gap[0] > far[0] or gap[1] > far[1]):
            off.append((norm, gap, gap_then))
    if not off:
        return
    effect = Effect(subject, now, calibrated)  # which takes two more passes over the data
    if not effect.matters:
        subject.held[RULE.code] = (
            f"{len(off)} layer{'s are' if len(off) > 1 else ' is'} off since the change; {effect.reservation}"
        )
        return
    for norm, gap, gap_then in off:
        yield RULE.found(
            norm.path,
            f"its running mean was {gap_then[0]:.2g} standard deviations off before and is {gap[0]:.2g} off now, "
            f"its variance by a factor of {math.exp(gap_then[1]):.2g} and {math.exp(gap[1]):.2g}; {effect.words}",
            "bn.calibrate(model, batches of the training data)",
            severity="error" if effect.grave else None,
            mean_off=gap[0],
            mean_off_before=gap_then[0],
            variance_log_ratio=gap[1],
            variance_log_ratio_before=gap_then[1],
            running_var=few(norm.running_var),
            fresh_var=few(layers[norm.path].running_var),
            **effect.numbers,
        )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Recompute the statistics."""
    repair.model, done = measured(repair.model, repair.need("batches", RULE.code), repair.forward)
    return done.report


RULE = Rule(
    "BN504", "stale-after-compression", "warning", __doc__, look, ("model", "before", "data"), fix=fix,
    safety="unsafe", keeps=False,
)  # fmt: skip
