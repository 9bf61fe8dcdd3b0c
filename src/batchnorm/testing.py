"""For test suites: assert that a model has none of the bugs that the doctor knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchnorm.doctor.check import Purpose, check
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.subject import BATCHES, Forward
from batchnorm.errors import printable
from batchnorm.optim import Optimizers

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["assert_healthy"]


def assert_healthy(
    model: nn.Module | Mapping[str, Tensor],
    example: Any = None,
    data: Iterable[Any] | None = None,
    optimizer: Optimizers = None,
    *,
    forward: Forward | None = None,
    before: nn.Module | None = None,
    purpose: Purpose = "",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    per_module_ignores: Mapping[str, Sequence[str]] | None = None,
    fail_on: str = "warning",
    max_batches: int = BATCHES,
) -> Findings:
    """Check a model as `batchnorm.check` does; raise AssertionError with the findings if there are any that fail.

    >>> import torch, batchnorm as bn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> bn.testing.assert_healthy(model, torch.randn(8, 3), select=["BN101"])  # advice, which does not fail
    <Findings: 1 advice>
    >>> bn.testing.assert_healthy(model, torch.randn(8, 3), select=["BN101"], fail_on="advice")
    Traceback (most recent call last):
    AssertionError: the model is not healthy: 1 advice
      advice   0: BN101 bias-before-norm: its bias of 4 values does nothing: 1 subtracts the mean
               bias=False; bn.drop_bias(model, example) does it without changing evaluation

    ``fail_on`` is the least severity that fails: "error", "warning" or "advice". ``ignore`` has codes, their beginnings
    or names; ``per_module_ignores`` the same for patterns of module paths (``{"backbone.*": ["BN101"]}``). All findings
    are returned, those that do not fail too. The settings in pyproject.toml are those of the command, not of this.
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead
    Findings([]).at_least(fail_on)  # a word that is none is refused before anything runs
    findings = check(
        model, example, data, optimizer, forward=forward, before=before, purpose=purpose, select=select, ignore=ignore,
        max_batches=max_batches,
    ).without(per_module_ignores or {})  # fmt: skip
    failing = Findings(findings.at_least(fail_on))
    if failing:
        lines = [f"the model is not healthy: {failing.counted()}"]
        for finding in failing:
            lines.append(f"  {finding.severity:<8} {printable(str(finding))}")
            if finding.repair:
                lines.append(f"           {printable(finding.repair)}")
        raise AssertionError("\n".join(lines))
    return findings
