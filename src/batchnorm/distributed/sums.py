"""Sums over the ranks of a group that autograd can differentiate twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchnorm.distributed.exchange import gather
from batchnorm.distributed.ledger import CallEntry


def over_ranks(line: CallEntry, group: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that adds a tensor up over all ranks, each of which has to call it.

    >>> reduce = over_ranks(line, group)  # doctest: +SKIP
    >>> reduce(torch.ones(2, 3, dtype=torch.float64))  # doctest: +SKIP

    The sum is taken in the order of the ranks, in float64, so that every rank has the same bits.
    """

    def reduce(sums: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(sums, line, group)  # type: ignore[no-untyped-call]
        return total

    return reduce


def alone(sums: Tensor) -> Tensor:
    """Return the sums as they are: for a layer whose input needs no gradient on any rank.

    >>> alone(torch.ones(2))
    tensor([1., 1.])
    """
    return sums


class _Sum(torch.autograd.Function):
    """Its own derivative: what one rank puts in reaches every rank's sum."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, line: CallEntry, group: Any) -> Tensor:  # type: ignore[override]
        ctx.line, ctx.group = line, group
        rows, _ = gather(sums.to(torch.float64).reshape(-1), line, group)
        return rows.sum(0).view(sums.shape).to(sums.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        total: Tensor = _Sum.apply(grad, ctx.line, ctx.group)  # type: ignore[no-untyped-call]
        return total, None, None
