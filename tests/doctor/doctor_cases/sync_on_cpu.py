"""BN106, after mmsegmentation#387: a segmentation model that was trained on GPUs is used on a CPU."""

import torch
from torch import nn

import batchnorm as bn


def network(norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


class OwnSync(nn.SyncBatchNorm):
    pass


SICK = {
    "converted": lambda: {
        "model": nn.SyncBatchNorm.convert_sync_batchnorm(network()), "example": torch.randn(2, 3, 8, 8)
    },
    "one of two": lambda: {"model": network(nn.SyncBatchNorm).eval()},
    "without gamma": lambda: {"model": network(lambda c: nn.SyncBatchNorm(c, affine=False))},
    "a subclass": lambda: {"model": network(OwnSync)},
}  # fmt: skip
NO_FIX = ("a subclass",)
HEALTHY = {
    "plain": lambda: {"model": network()},
    "ours": lambda: {"model": bn.convert(network(), "sync")[0]},
    "on no device": lambda: {"model": network(lambda c: nn.SyncBatchNorm(c, device="meta"))},
}
