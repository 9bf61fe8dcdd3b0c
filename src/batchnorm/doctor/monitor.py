"""``monitor``: the rules that look on while training runs, through hooks that are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from batchnorm.doctor.codes import chosen
from batchnorm.doctor.run import Run
from batchnorm.errors import BatchNormError
from batchnorm.graph import check_ready
from batchnorm.transforms.freeze import Optimizers, check_optimizers


def monitor(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    copies: Mapping[str, nn.Module] | None = None,
    every: int = 50,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    warn: bool = True,
) -> Run:
    """Look on while a model trains: ``with monitor(model, optimizer) as run:`` around any loop.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with monitor(model, optimizer, warn=False) as run:
    ...     for x in torch.randn(3, 8, 3):
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    ...     with torch.no_grad():  # nobody called model.eval()
    ...         loss = model(torch.randn(8, 3)).square().mean()
    >>> run.findings.codes
    ('BN301',)

    What is found is warned of once for every rule, at the step where it happens, and collected in ``run.findings``.
    ``copies`` are averaged, target or teacher networks that follow the model, by name. In every ``every``-th step the
    numbers are looked at, in the others only shapes and flags. ``run.told(labels)`` before a call tells the labels of
    the batch. A rule that breaks is left out from then on, and is in ``run.failed``; the training goes on.
    """
    check_ready(model, "monitor")
    if every < 1:
        raise BatchNormError(f"every is {every}", where="monitor", do="give a whole number from 1 up")
    rules = chosen(tuple(select), tuple(ignore))
    watchers = {code: rule.watch() for code, rule in rules.items() if rule.watch is not None}
    optimizers = tuple(check_optimizers(model, optimizer, "monitor"))
    return Run(model, optimizers, dict(copies or {}), watchers, every, warn)
