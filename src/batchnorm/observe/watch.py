"""``watch``: sample the signals of a network while it trains, with hooks only in the sampled steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.graph import check_hookable
from batchnorm.observe.places import Layers, places, weighted
from batchnorm.observe.quantities import chosen
from batchnorm.observe.quantities.histogram import BINS
from batchnorm.observe.run import Watch
from batchnorm.observe.sinks import sinks_of
from batchnorm.optim import Optimizers
from batchnorm.records import RecordFile
from batchnorm.transforms.follow import check_optimizers

_HERE = "watch"


def watch(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    every: int = 50,
    quantities: str | Iterable[str] | None = None,
    to: Any = None,
    stack: str = "",
    layers: Layers = None,
    range: tuple[float, float] | None = None,
    bins: int = BINS,
    start: int = 0,
) -> Watch:
    """Record the signals of a network while it trains: ``with watch(model) as seen:`` around any loop.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Linear(4, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, every=2, quantities=["percentiles", "saturation"]) as seen:
    ...     for x in torch.randn(3, 8, 3):
    ...         loss = model(x).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         seen.log("training loss", loss)
    >>> [(m.setting["step"], m.samples) for m in seen.records.measurements if m.quantity == "saturation"]
    [(0, (0.0,)), (2, (0.0,))]
    >>> sorted({m.setting["layer"] for m in seen.records.measurements if m.quantity == "percentiles"})
    ['1', '2', '3']

    **Where:** at the inputs of activation modules and of BN layers, and at the outputs of linear, convolutional and
    BN layers that none of those reads directly (see `batchnorm.observe.places`).
    ``layers`` selects by path or pattern, and gives names: ``{"layer 1": "net.1"}``. ``quantities`` are all by default;
    `batchnorm.observe.quantities.QUANTITIES` is the table, with one page for each.

    **When:** in every ``every``-th step of the optimiser, from step ``start``, at the first call of the model in
    training mode with gradients. Without ``optimizer``, the first one that steps and holds parameters of the model
    counts; of several, the first; of a wrapper (accelerate's, Lightning's), the optimizer inside. A loop without a
    torch optimiser calls ``seen.step()`` instead. At other steps there are no hooks in the model. Large signals are
    sampled at fixed places, without random numbers.

    **Histograms** of a layer have the same bins throughout: those of ``range``, or chosen at the first record (see
    `batchnorm.observe.quantities.histogram`).

    **Output:** ``to`` is a path (a file of JSON lines, which can be read while it grows: `batchnorm.records.read`), a
    ``SummaryWriter``, a sink of `batchnorm.observe.sinks`, or a list; by default memory. ``stack`` names the network,
    for several in one file. ``seen.records`` is everything so far, ``seen.show()`` prints it, a notebook draws it.

    The training is not changed: not its numbers, its random states, modes or hooks. A quantity or a file that fails
    warns and is disabled from then on; the training continues.
    """
    check_hookable(model, _HERE)
    for name, number, least in (("every", every, 1), ("bins", bins, 1), ("start", start, 0)):
        if not isinstance(number, int) or number < least:
            raise BatchNormError(f"{name} is {number!r}", where=_HERE, do=f"give a whole number from {least} up")
    wanted = chosen(quantities, _HERE)
    optimizers = check_optimizers(model, optimizer, _HERE)
    header = RecordFile(
        "watch",
        {
            "model": type(model).__name__,
            "stack": stack,
            "every": every,
            "quantities": [quantity.name for quantity in wanted],
            "bins": bins,
            "range": _checked(range),
        },
        (),
    )
    found, own = places(model, layers, _HERE), weighted(model, layers, _HERE)
    return Watch(model, optimizers, found, own, wanted, sinks_of(to), header, start)


def _checked(range: Any) -> tuple[float, float] | None:
    if range is None:
        return None
    try:
        low, high = (float(edge) for edge in range)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (low < high and math.isfinite(high - low)):
        raise BatchNormError(f"range is {range!r}", where=_HERE, do="give two finite numbers, the lower one first")
    return low, high
