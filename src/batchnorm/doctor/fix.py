"""``fix``: repair findings on a copy of the model, through the transforms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from batchnorm.doctor.codes import RULES
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.repair import Needed, Repair
from batchnorm.doctor.subject import Forward
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.optim import Optimizers
from batchnorm.preserve import in_mode
from batchnorm.records import Certificate, Change, Finding, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import carry_over, check_optimizers, copied_with, restorable
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.verify import verify


def fix(
    model: nn.Module,
    findings: Iterable[Finding],
    *,
    optimizer: Optimizers = None,
    unsafe: bool = False,
    example: Any = None,
    data: Iterable[Any] | None = None,
    forward: Forward | None = None,
    tolerance: float | None = None,
) -> tuple[nn.Module, Report]:
    """Return a repaired copy of the model, and the report with its certificate.

    >>> import torch
    >>> from batchnorm import check
    >>> x = torch.randn(4, 3, 8, 8)
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> repaired, report = fix(model, check(model, x, select=["BN101"]))
    >>> repaired[0].bias is None, len(check(repaired, x, select=["BN101"]))
    (True, 0)

    Only safe repairs are made, unless ``unsafe`` is true. Findings that are left, also for lack of an example or data,
    have the reason in the report. ``example``, ``data``, ``forward`` and the optimisers are those of the check unless
    given. The optimisers follow to the copy with their groups and state; if anything raises, neither they nor the model
    have changed. If every repair keeps the function in evaluation mode the certificate confirms that, up to
    ``tolerance`` (a share of the largest output); else it says how far the outputs moved.
    """
    subject = findings.subject if isinstance(findings, Findings) else None
    wanted = list(findings)
    for one in wanted:
        if not isinstance(one, Finding):
            raise BatchNormError(
                f"a finding is a {type(one).__name__}",
                where="fix",
                do="give what bn.check returned, or some of it: fix(model, check(model, example))",
            )
    if optimizer is None and subject is not None and subject.model is model:
        optimizer = subject.optimizers
    optimizers = check_optimizers(model, optimizer, "fix")
    batches = tuple(data) if data is not None else tuple(subject.batches) if subject else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it copies a program that it exported
        copied, moved = copied_with(model, where="fix")
    repair = Repair(
        copied,
        optimizers,
        example if example is not None else subject.example if subject else None,
        batches,
        forward or (subject._forward if subject else None),
        subject.before if subject else None,
        subject.process_group if subject else None,
    )
    restore = restorable(optimizers)
    try:
        carry_over(optimizers, moved)
        report = _repair(model, repair, wanted, unsafe, tolerance)
    except BaseException:
        restore()
        raise
    left_behind(model, repair.model, "fix")
    return Changed((repair.model, report))


def _repair(model: nn.Module, repair: Repair, wanted: list[Finding], unsafe: bool, tolerance: float | None) -> Report:
    """Run the repairs on a copy of the model."""
    changes: list[Change] = []
    left: dict[str, str] = {}
    keeps = True
    for code, rule in RULES.items():
        own = [finding for finding in wanted if finding.code == code]
        reparable = [f for f in own if rule.fix and (f.fix == "safe" or (unsafe and f.fix == "unsafe"))]
        for finding in own:
            if finding not in reparable:
                why = "its repair is not safe (unsafe=True)" if finding.fix == "unsafe" else "no automatic repair"
                _leave(left, finding.path, f"{code}: {why}: {finding.repair}")
        if reparable:
            assert rule.fix is not None
            try:
                report = rule.fix(repair, reparable)
            except Needed as needed:  # the others are repaired all the same
                for finding in reparable:
                    _leave(left, finding.path, f"{needed.problem}: {needed.do}")
                continue
            changes += report.changes
            for path, why in report.left.items():
                if _named(path, reparable):
                    _leave(left, path, f"{code}: {why}")
            keeps = keeps and (rule.keeps or not report.changes)
    certificate = (
        _certify(model, repair, tolerance if keeps else float("inf"))
        if changes and repair.example is not None
        else None
    )
    return Report(tuple(changes), left, certificate)


def _leave(left: dict[str, str], path: str, why: str) -> None:
    """Note why something was left alone; a module may have several findings."""
    left[path] = f"{left[path]}; {why}" if path in left else why


def _named(path: str, findings: list[Finding]) -> bool:
    return any(finding.path == path for finding in findings)


def _certify(model: nn.Module, repair: Repair, tolerance: float | None) -> Certificate | None:
    before, after = in_mode(copy.deepcopy(model), False), in_mode(copy.deepcopy(repair.model), False)
    try:
        return verify(before, after, repair.example, verb="fix", forward=repair.forward, tolerance=tolerance)
    except NotEquivalent:
        raise
    except BatchNormError:  # the model gave nothing that could be compared: that may be why it was repaired
        if tolerance != float("inf"):
            raise
        return None
