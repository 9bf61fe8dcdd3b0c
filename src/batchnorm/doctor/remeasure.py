"""Repair wrong running statistics: recompute those of some layers from the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.subject import measured
from batchnorm.records import Change, Finding, Report


def remeasure(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Recompute the running statistics of the layers with findings; the others keep theirs.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> _ = model[0].running_var.zero_()
    >>> finding = Finding("BN209", "vanished-variance", "error", "0", "its running variance is zero")
    >>> [change.what for change in remeasure(Repair(model, batches=(torch.randn(64, 2),)), [finding]).changes]
    ['running_mean', 'running_var']
    """
    batches = repair.need("batches", findings[0].code)
    modules = dict(repair.model.named_modules(remove_duplicate=False))
    wanted = {finding.path for finding in findings}
    wrong = {id(modules[path]) for path in wanted}
    for path in wanted:
        modules[path].reset_running_stats()
    others = [m for m in repair.model.modules() if isinstance(m, _BatchNorm) and id(m) not in wrong]
    kept = [(t, t.detach().clone()) for layer in others for t in layer._buffers.values() if t is not None]
    repair.model, done = measured(repair.model, batches, repair.forward)
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    changes = [change for change in done.report.changes if change.path in wanted]
    changed = {change.path for change in changes}
    changes += [Change(path, "running statistics", "wrong", "0 and 1") for path in wanted - changed]
    return Report(tuple(changes), {path: why for path, why in done.report.left.items() if path in wanted})
