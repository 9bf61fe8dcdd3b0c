"""``monitor``: run rules during training, through hooks that are removed afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from batchnorm.checks import check_model
from batchnorm.doctor.codes import chosen
from batchnorm.doctor.run import MonitoredRun
from batchnorm.errors import BatchNormError
from batchnorm.graph import check_hookable
from batchnorm.optim import Optimizers
from batchnorm.transforms.follow import check_optimizers

_HERE = "monitor"
Models = nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module]


def monitor(
    model: Models,
    optimizer: Optimizers = None,
    *,
    copies: Mapping[str, nn.Module] | None = None,
    every: int = 50,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    warn: bool = True,
) -> MonitoredRun:
    """Check a model while it trains: ``with monitor(model, optimizer) as run:`` around any loop.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with monitor(model, optimizer, warn=False) as run:
    ...     for x in torch.randn(3, 8, 3):
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    ...     with torch.no_grad():  # model.eval() was forgotten
    ...         loss = model(torch.randn(8, 3)).square().mean()
    >>> run.findings.codes
    ('BN301',)

    Each rule warns once, at the step where it finds something; all findings are in ``run.findings``. ``copies`` are
    averaged, target or teacher networks that follow the model, by name. In every ``every``-th step the values are read,
    in the others only shapes and flags. ``run.set_labels(labels)`` before a call gives the labels of its batch. A rule
    that raises is disabled from then on and listed in ``run.failed``; the training continues.

    ``optimizer`` is one, several or a dictionary of them; the optimizer inside a wrapper is found (accelerate's and
    Lightning's, anything with ``.optimizer`` or ``param_groups``: see `batchnorm.optim.unwrapped`). Without it, every
    optimiser that holds parameters of the model counts. Networks that train together, such
    as a GAN's, go into one monitor, ``monitor({"G": generator, "D": discriminator})``: paths begin with the name, and
    the steps of each are those of its own optimiser. Give a wrapper (DistributedDataParallel) or the module in it;
    replicas of nn.DataParallel are not seen. A compiled model raises, because its hooks would not run.
    """
    whole = _together(model)
    check_hookable(whole, _HERE)
    if every < 1:
        raise BatchNormError(f"every is {every}", where=_HERE, do="give a whole number from 1 up")
    rules = chosen(select, ignore)
    watchers = {code: rule.watch() for code, rule in rules.items() if rule.watch is not None}
    optimizers = check_optimizers(whole, optimizer, _HERE)
    if copies is not None and not isinstance(copies, Mapping):
        raise BatchNormError(
            f"copies is a {type(copies).__name__}", where=_HERE, do='give them by name: copies={"ema": averaged}'
        )
    for name, copied in (copies or {}).items():
        if not isinstance(copied, nn.Module):
            raise BatchNormError(f"the copy {name!r} is a {type(copied).__name__}", where=_HERE, do="give nn.Modules")
    return MonitoredRun(whole, optimizers, dict(copies or {}), watchers, every, warn)


def _together(model: Models) -> nn.Module:
    """One module that has all of the given ones, by their names."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Iterable):
        check_model(model, _HERE)
    given = dict(model) if isinstance(model, Mapping) else {str(i): m for i, m in enumerate(model)}
    for name, one in given.items():
        if not isinstance(one, nn.Module):
            raise BatchNormError(f"model {name!r} is a {type(one).__name__}", where=_HERE, do="give nn.Modules")
    try:
        return nn.ModuleDict(given)
    except KeyError as error:  # a dot in it, or an attribute's name
        raise BatchNormError(f"a model cannot have this name: {error}", where=_HERE, do="give it another") from error
