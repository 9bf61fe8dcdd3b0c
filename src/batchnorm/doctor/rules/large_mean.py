"""A mean so large, or values so large, that single precision loses what is to be normalised.

## What it does
Where the mean of a channel is hundreds of standard deviations from zero, or values are near the end of float32, it runs
the layer's arithmetic on what the layer is given, in float32 and in float64, and measures the difference.

## Why is this bad?
The variance is a small difference of large numbers: written as E[x^2] - E[x]^2 it can come out negative, and in other
ways it loses digits too. Normalised values are then off, in all channels that have such a mean (depth maps in
millimetres, time stamps, prices, intensities that were not centred). Squares of values above 1e19 are infinite, and the
layer's output is 0. Our layers accumulate in double precision.

## Example
```python
x = torch.randn(64, 32, 8, 8) + 1e6  # the layer divides what is left of the noise by what is left of the variance
nn.BatchNorm2d(32)(x.contiguous(memory_format=torch.channels_last))
```

## Use instead
```python
bn.BatchNorm2d(32)(x)  # or subtract a constant from the data first
```

## Fix safety
Safe: torch's layers become ours, which compute the same with more digits.

## References
- google/flax#1491
- keras-team/keras#18795
- pytorch/pytorch#178123
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.repair import PLAIN, Repair, to_ours
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.tallies import SHARED, shared, training_norms
from batchnorm.functional import batch_norm, moments
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.records import Change, Finding, Report

ERROR = 0.01  # standard deviations of the output, in the worst channel
RATIO, LARGE = 300.0, 1e15  # below, float32 has digits enough: it is not measured


class _ErrorTally:
    """The largest error of one layer, over the batches."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.worst: dict[str, Any] = {}

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        if mask is not None or x.dim() < 2 or x.numel() <= x.shape[1] or x.dtype == torch.float64:
            return True
        found = moments(x)
        if not bool(found.mean.isfinite().all()) or not bool(x.isfinite().all()):
            return True  # another rule's business
        ratio = found.mean.abs() / (found.var + self.layer.eps).sqrt()
        if float(ratio.max()) < RATIO and float(x.abs().max()) < LARGE:
            return True
        given = x.float()  # a half is added up in single precision
        single = F.batch_norm(given, None, None, None, None, True, 0.0, self.layer.eps)
        double = F.batch_norm(x.double(), None, None, None, None, True, 0.0, self.layer.eps)
        ours = batch_norm(given, None, None, None, None, True, 0.0, self.layer.eps)
        errors = [_worst(ours if isinstance(self.layer, _BatchNormBase) else single, double), _worst(ours, double)]
        if errors[0][0] > self.worst.get("error", 0.0):
            channel = errors[0][1]
            self.worst = {
                "error": errors[0][0], "error_of_ours": errors[1][0], "channel": channel,
                "mean": float(found.mean[channel]), "deviation": float(found.var[channel].sqrt()),
                "ratio": float(ratio[channel]), "channels": int((ratio >= RATIO).sum()),
            }  # fmt: skip
        return True


def _worst(got: Tensor, expected: Tensor) -> tuple[float, int]:
    """The largest error of a channel (root mean square), and of which."""
    dims = [0, *range(2, got.dim())]
    errors = (got.double() - expected).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).square().mean(dims).sqrt()
    return float(errors.max()), int(errors.argmax())


def look(subject: Subject) -> Iterator[Finding]:
    """Measure the error of the layers whose inputs are far from zero."""
    tallies = shared(subject, RULE.code)
    for path, layer in training_norms(subject).items():
        worst = tallies[layer].worst
        if worst.get("error", 0.0) <= ERROR:
            continue
        better = worst["error_of_ours"] < worst["error"] / 10
        yield RULE.found(
            path,
            f"channel {worst['channel']} has a mean of {worst['mean']:.3g} and a deviation of {worst['deviation']:.3g}:"
            f" in single precision its output is off by {worst['error']:.2g} standard deviations"
            + (f" (by {worst['error_of_ours']:.1g} with batchnorm's layer)" if better else ""),
            "bn.BatchNorm1d/2d/3d, or subtract a constant from the data" if better else "centre and scale the data",
            fix=None if better and type(layer) in PLAIN else "none",
            **worst,
        )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Exchange the classes."""
    modules = dict(repair.model.named_modules(remove_duplicate=False))
    done = {path: to_ours(path, modules[path]) for path in dict.fromkeys(finding.path for finding in findings)}
    changes = tuple(change for change in done.values() if isinstance(change, Change))
    return Report(changes, {path: why for path, why in done.items() if isinstance(why, str)})


RULE = Rule(
    "BN207", "large-mean", "warning", __doc__, look, ("model", "example"), fix=fix, safety="safe", keeps=False
)  # fmt: skip
SHARED[RULE.code] = lambda subject: {layer: _ErrorTally(layer) for layer in training_norms(subject).values()}
