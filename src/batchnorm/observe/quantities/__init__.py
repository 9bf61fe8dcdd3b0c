"""The table of quantities, in the order in which they are recorded."""

from __future__ import annotations

from collections.abc import Iterable

from batchnorm.errors import BatchNormError
from batchnorm.observe.quantities import (
    beta,
    dead,
    effective_learning_rate,
    gamma,
    gap,
    gradient_norm,
    histogram,
    mean,
    percentiles,
    saturation,
    variance,
    weight_norm,
)
from batchnorm.observe.quantity import Quantity

_MODULES = (
    histogram, percentiles, mean, variance, saturation, dead, gap, gamma, beta, weight_norm, effective_learning_rate,
    gradient_norm,
)  # fmt: skip
QUANTITIES: dict[str, Quantity] = {module.QUANTITY.name: module.QUANTITY for module in _MODULES}


def chosen(names: str | Iterable[str] | None, where: str) -> tuple[Quantity, ...]:
    """Return the quantities of these names; of None, all.

    >>> [quantity.name for quantity in chosen(["mean", "histogram"], "watch")]
    ['histogram', 'mean']
    """
    if names is None:
        return tuple(QUANTITIES.values())
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in QUANTITIES]
    if unknown:
        known = ", ".join(QUANTITIES)
        raise BatchNormError(f"{unknown[0]!r} is not a quantity", where=where, do=f"use any of {known}")
    return tuple(quantity for name, quantity in QUANTITIES.items() if name in wanted)
