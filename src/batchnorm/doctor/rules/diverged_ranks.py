"""Ranks whose running statistics differ: what is saved depends on who saves it.

## What it does
Every rank of the process group sends its running statistics, and all compare them: by how many standard deviations the
means differ from those of all ranks together, by which factor the variances, and which rank is furthest.

## Why is this bad?
Without synchronised layers every rank's BN sees its own share of the data. The ranks' parameters are kept equal by
their gradients, the statistics by nothing: each rank evaluates another network, and rank 0 saves its own. With
DistributedDataParallel's broadcast all but rank 0's are thrown away at every step, with shares of the data that differ
(sorted, or one source a rank) they are not those of the data at all.

## Example
```python
model = DistributedDataParallel(model, broadcast_buffers=False)
...
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")  # the statistics of one share of the data
```

## Use instead
```python
model, report = bn.convert(model, "sync")  # before wrapping: the batch of all ranks
model, calibrated = bn.calibrate(model, batches, process_group=dist.group.WORLD)  # or measure them, once, at the end
```

## Fix safety
Unsafe: it changes evaluation on every rank. The statistics become those of all ranks together, each weighing as many
batches as it counted, with the variance between them. Every rank has to call ``fix``.

## References
- huggingface/pytorch-image-models#110
- facebookresearch/fvcore#152
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.distributed.agreement import Together
from batchnorm.distributed.groups import members
from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject
from batchnorm.moments import Moments, merged
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.measuring import replaced

OFF, APART = 0.1, 0.1  # standard deviations; natural logarithm of the ratio of variances


def look(subject: Subject) -> Iterator[Finding]:
    """Compare everybody's statistics with those of all together."""
    norms = [norm for norm in subject.norms if _flat(norm)]
    ranks = members(subject.process_group)
    for norm, parts in zip(norms, _of_all(norms, subject.process_group), strict=True):
        whole = merged(parts)
        width = whole.var + norm.eps
        off = ((parts.mean - whole.mean).square() / width).mean(1).sqrt()
        apart = ((parts.var + norm.eps) / width).log().square().mean(1).sqrt()
        lost = ~(off.isfinite() & apart.isfinite())
        if bool(lost.all()):  # nobody has statistics that could be compared, or all were merged with such
            lost = ~(parts.mean.isfinite().all(1) & parts.var.isfinite().all(1))
            if not bool(lost.any()) or bool(lost.all()):
                continue
            bad = [rank for rank, one in zip(ranks, lost.tolist(), strict=True) if one]
            yield RULE.found(
                norm.path,
                f"its running statistics are not finite on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}",
                "load a checkpoint on every rank, or bn.calibrate with process_group=",
                fix="none",
                ranks=bad,
            )
            continue
        far = int((off / OFF).maximum(apart / APART).argmax())
        if float(off.max()) > OFF or float(apart.max()) > APART:
            yield RULE.found(
                norm.path,
                f"its running mean on rank {ranks[far]} is {float(off[far]):.2g} standard deviations from that of all "
                f"{len(ranks)} ranks, and its variance by a factor of {math.exp(float(apart[far])):.2g}: what is saved "
                "depends on the rank",
                'bn.convert(model, "sync") before training; now bn.calibrate with process_group=, or bn.fix',
                rank=ranks[far],
                mean_off=off.tolist(),
                variance_log_ratio=apart.tolist(),
                batches=parts.count.tolist(),
            )


def _flat(norm: Norm) -> bool:
    return norm.running_mean is not None and norm.running_var is not None and norm.running_mean.dim() == 1


def _of_all(norms: Sequence[Norm], group: object) -> list[Moments]:
    """The statistics of every rank, a row each, layer by layer; a rank's weight is how many batches it counted."""
    numbers: list[Tensor] = [torch.zeros(1)]  # so that there is something to send
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        count = 1 if norm.num_batches_tracked is None else max(int(norm.num_batches_tracked), 1)
        numbers += [torch.tensor([float(count)]), norm.running_mean.detach().cpu(), norm.running_var.detach().cpu()]
    rows = Together(group, "check").rows(torch.cat([t.double() for t in numbers]))
    found, at = [], 1
    for norm in norms:
        assert norm.running_mean is not None
        channels = len(norm.running_mean)
        counts, mean, var = torch.split(rows[:, at : at + 1 + 2 * channels], [1, channels, channels], 1)
        found.append(Moments(counts[:, 0], mean, var))
        at += 1 + 2 * channels
    return found


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Give every rank the statistics of all."""
    modules = dict(patient.model.named_modules(remove_duplicate=False))
    wanted = dict.fromkeys(finding.path for finding in findings)
    layers = [(path, layer) for path in wanted if isinstance(layer := modules[path], _BatchNorm)]
    norms = [Norm(path, None, None, m.running_mean, m.running_var, m.num_batches_tracked, m) for path, m in layers]
    changes: list[Change] = []
    for (path, layer), parts in zip(layers, _of_all(norms, patient.process_group), strict=True):
        whole = merged(parts)
        changes += replaced(path, layer, whole.mean, whole.var)
    return Report(tuple(changes))


RULE = Rule(
    "BN401", "diverged-ranks", "warning", __doc__, look, ("model", "ranks"), fix=fix, safety="unsafe", keeps=False
)  # fmt: skip
