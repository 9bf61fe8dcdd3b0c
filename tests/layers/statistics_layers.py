"""The layers that say what a batch is, side by side: how each is made and called."""

import math
from dataclasses import dataclass
from typing import Any

import torch

import batchnorm as bn


@dataclass(frozen=True)
class Kind:
    """A class, the arguments that make it itself, and whether its forward wants a mask."""

    layer: type
    own: dict[str, Any]
    masked: bool = False

    def make(self, channels=20, **options):
        return self.layer(channels, **self.own, **options)

    def call(self, layer, x, **given):
        """Masks are drawn from the shape of x, always the same one."""
        if not self.masked:
            return layer(x, **given)
        return layer(x, mask_for(x), **given)


def mask_for(x):
    """About two places in three, without a random number, which a transformation would have a word about."""
    places = (x.shape[0], *x.shape[2:])
    mask = (torch.arange(math.prod(places)) * 7919 % 31 > 10).view(places)
    mask[:2] = True
    return mask


KINDS = {
    "masked": Kind(bn.MaskedBatchNorm, {}, masked=True),
    "ghost": Kind(bn.GhostBatchNorm, {"virtual_batch_size": 3}),
    "split": Kind(bn.SplitBatchNorm, {"splits": 2}),
    "shuffled": Kind(bn.SplitBatchNorm, {"splits": 3, "shuffle": True}),
    "renorm": Kind(bn.BatchRenorm, {"rmax": 1.5, "dmax": 0.5}),
}
