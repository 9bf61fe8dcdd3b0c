"""A momentum or an eps from elsewhere: Keras counts momentum the other way round, and arguments get mixed up.

## What it does
Finds BN layers whose running statistics follow the last batch or two (momentum of 0.5 and more), whose momentum makes
them unstable (outside of 0 to 1), or whose eps is so large that it does more than prevent division by zero.

## Why is this bad?
In torch, momentum is the weight of the new batch: 0.1 means that the running statistics are an average of about 19
batches. In Keras, TensorFlow and flax it is the weight of the old value: their 0.99 is torch's 0.01. Copied as it is,
it makes the running statistics those of the last batch, and evaluation as noisy as one batch. An eps of 0.8 comes from
``nn.BatchNorm2d(64, 0.8)``, whose second argument is eps; it shrinks every channel of small variance. By how much is
measured on the running variances; where they are so large that it takes less than 1 %, it is advice.

An eps of 1e-3 is Keras's default, and right for weights that were trained with it.

## Example
```python
nn.BatchNorm2d(64, momentum=0.99)
```

## Use instead
```python
nn.BatchNorm2d(64, momentum=1 - 0.99)
```

## Fix safety
Safe for a momentum from 0.9 to 1 (without 1 itself), which becomes 1 - momentum: evaluation does not change until
training continues. Unsafe for one from 0.5 to 0.9. A momentum of 1 cannot come from Keras, where it would mean never to
learn; it is used on purpose, to take the statistics of one batch, and is only mentioned. Eps is part of the function,
and is not changed.

## References
- affinelayer/pix2pix-tensorflow#126
- pytorch/vision#8250 (MaxViT, 0.99 for 0.01)
- huggingface/transformers#19454
- ludwig-ai/ludwig#2100
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.switches import uses
from batchnorm.records import Change, Finding, Report

FOREIGN, SURELY = 0.5, 0.9  # of a momentum: more than torch's users choose; what Keras's users do
HARMLESS = 0.01  # of its size: what eps may take from a channel
LARGE_EPS = 0.01  # ten times the largest that frameworks have as a default


def look(subject: Subject) -> Iterator[Finding]:
    """Judge the momentum and the eps of every layer."""
    for norm in subject.norms:
        assert norm.layer is not None
        if norm.layer.momentum is not None and uses(norm.layer, training=True)[1]:
            yield from _momentum(norm.path, float(norm.layer.momentum))
        yield from _eps(norm.path, norm.layer, norm.is_new)


def _momentum(path: str, momentum: float) -> Iterator[Finding]:
    if not 0.0 <= momentum <= 1.0:
        yield RULE.found(
            path,
            f"momentum {momentum:g} weighs the old statistics by {1 - momentum:g}: they are no longer an average",
            "use a momentum from 0 to 1; torch's default is 0.1",
            severity="error", fix="none", momentum=momentum,
        )  # fmt: skip
    elif momentum >= FOREIGN:
        batches = (2 - momentum) / momentum  # as many independent batches as have the variance of the average
        average = f"the running statistics are an average of {batches:.1f} batches"
        if momentum == 1.0:
            yield RULE.found(
                path,
                "momentum 1 keeps the statistics of the last batch alone",
                "0.1, or None for an average over all batches, if evaluation is to follow more than one batch",
                severity="advice", fix="none", momentum=momentum, batches=batches,
            )  # fmt: skip
        else:
            yield RULE.found(
                path,
                f"momentum {momentum:g} is the weight of the new batch: {average}",
                f"momentum={1 - momentum:.4g} (torch's is 1 - Keras's)",
                fix="safe" if momentum >= SURELY else "unsafe",
                momentum=momentum, batches=batches, torchs=round(1 - momentum, 6),
            )  # fmt: skip


def _eps(path: str, layer: _BatchNorm, new: bool) -> Iterator[Finding]:
    eps, var = float(layer.eps), layer.running_var
    if eps < 0.0 or (eps == 0.0 and uses(layer, training=True)[0]):
        yield RULE.found(
            path,
            f"eps is {eps:g}: training raises, or divides by zero where a channel is constant in a batch",
            "eps=1e-5, torch's default",
            severity="error", fix="none", eps=eps,
        )  # fmt: skip
    elif eps >= LARGE_EPS:
        known = var is not None and not var.is_meta and not new
        small = float((var.detach() < eps).double().mean()) if known and var is not None else 0.0
        below = f", and {small:.0%} of the channels have a variance below it" if known else ""
        swapped = "; a momentum has to be named, the second argument is eps" if 0.05 <= eps < 1.0 else ""
        kerass = f" (Keras's momentum of {eps:g} is momentum={1 - eps:.4g} here)" if 0.5 <= eps < 1.0 else ""
        usual = float(var.detach().double().clamp(min=0.0).median()) if known and var is not None else 1.0
        shrinks = 1 - (usual / (usual + eps)) ** 0.5
        whose = f"the median variance of {usual:.2g}" if known else "variance 1"
        numbers: dict[str, Any] = {"share_below": small} if known else {}
        yield RULE.found(
            path,
            f"eps is {eps:g}: a channel of {whose} is shrunk by {shrinks:.2g} of its size{below}",
            f"eps=1e-5, torch's default{swapped}{kerass}",
            severity="advice" if known and shrinks < HARMLESS else "warning", fix="none", eps=eps, shrinks=shrinks,
            **numbers,
        )  # fmt: skip


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Count the momentum torch's way."""
    modules = dict(repair.model.named_modules())
    changes = []
    for finding in findings:
        layer = modules[finding.path]
        assert isinstance(layer, _BatchNorm)
        changes.append(Change(finding.path, "momentum", layer.momentum, finding.numbers["torchs"]))
        layer.momentum = finding.numbers["torchs"]
    return Report(tuple(changes))


RULE = Rule("BN104", "foreign-momentum", "warning", __doc__, look, ("model",), fix=fix, safety="safe")
