"""``shuffled``: run an encoder on all processes' examples in random order, so that batch statistics leak nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchnorm.distributed.groups import active, hold
from batchnorm.errors import BatchNormError, give_tensor


def shuffled(
    encoder: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    process_group: Any = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Run ``encoder`` on the examples of all ranks in a random order, and return its outputs in the order of ``x``.

    >>> x = torch.arange(6.0).view(6, 1)
    >>> torch.equal(shuffled(lambda batch: 2 * batch, x), 2 * x)
    True

    In contrastive learning a query and its key are made from one example. If both encoders normalise over the same
    examples, the batch's statistics carry a signature that solves the task without looking at the content: the loss is
    low and the features are poor. With the keys shuffled over the ranks, each rank's statistics are those of other
    examples than its queries' (MoCo's remedy). In one process all examples share a batch in any order, so there it
    only helps a layer that splits the batch: `SplitBatchNorm`, `GhostBatchNorm`.

    Every rank has to call it together; their batches may have different sizes. Gradients flow back to
    where the examples came from. The group's first rank draws the order (from ``generator``, or torch's default one)
    and sends it to the others.
    Costs one small message, and each example travels once to where it is encoded and once back.
    """
    if not isinstance(x, Tensor):
        raise BatchNormError(f"x is a {type(x).__name__}", where="shuffled", do=give_tensor(x))
    if x.dim() < 1:
        raise BatchNormError("there are no examples to shuffle in a single number", where="shuffled", do="give a batch")
    group = active(hold(process_group, "shuffled"), "shuffled")
    if group is None:
        order = torch.randperm(x.shape[0], generator=generator).to(x.device)
        return _checked(encoder(x[order]), x)[torch.argsort(order)]
    counts, seed = _agree(x.shape[0], generator, group)
    deal = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    there = _Dealt.apply(x, deal, counts, group)  # type: ignore[no-untyped-call]
    y = _checked(encoder(there), x)
    back: Tensor = _Dealt.apply(y, torch.argsort(deal), counts, group)  # type: ignore[no-untyped-call]
    return back


def _checked(y: Tensor, x: Tensor) -> Tensor:
    if not isinstance(y, Tensor) or y.dim() < 1 or y.shape[0] != x.shape[0]:
        found = f"shape {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise BatchNormError(
            f"the encoder made {found} of a batch of {x.shape[0]} examples",
            where="shuffled",
            do="give an encoder that returns one tensor, with a row for each example",
        )
    return y


def _agree(samples: int, generator: torch.Generator | None, group: Any) -> tuple[list[int], int]:
    """Exchange how many examples each rank has, and the seed of the first rank."""
    seed = int(torch.randint(2**62, (1,), generator=generator))
    mine = torch.tensor([samples, seed])
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group)
    return [int(one[0]) for one in gathered], int(gathered[0][1])


class _Dealt(torch.autograd.Function):
    """The examples of all ranks in another order: place p of the joint batch gets the example ``deal[p]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deal: Tensor, counts: list[int], group: Any) -> Tensor:  # type: ignore[override]
        ctx.deal, ctx.counts, ctx.group = deal, counts, group
        me, ranks = group.rank(), len(counts)
        owner = torch.repeat_interleave(torch.arange(ranks), torch.tensor(counts))  # of a place, and of an example
        first = sum(counts[:me])
        giver = owner[deal]
        # What I give away, in the order of the places it goes to, which is also the order of their owners.
        given = (giver == me).nonzero().squeeze(1)
        sizes_out = torch.bincount(owner[given], minlength=ranks).tolist()
        mine = giver[first : first + counts[me]]
        sizes_in = torch.bincount(mine, minlength=ranks).tolist()
        outgoing = x.detach()[(deal[given] - first).to(x.device)].contiguous()
        incoming = outgoing.new_empty((counts[me], *x.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group)
        # It comes in by giver, and from each giver in the order of my places.
        result = torch.empty_like(incoming)
        result[torch.argsort(mine, stable=True).to(x.device)] = incoming
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        home: Tensor = _Dealt.apply(grad, torch.argsort(ctx.deal), ctx.counts, ctx.group)  # type: ignore[no-untyped-call]
        return home, None, None, None
