"""torch's ``fuse_conv_bn_eval`` reads the numbers of a BN layer only, so layers of ours that do more refuse it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.nn.utils
from torch.nn.utils import fusion

from batchnorm.errors import BatchNormError

FUSERS = ("fuse_conv_bn_eval", "fuse_linear_bn_eval")
NAMESPACES: tuple[ModuleType, ...] = (fusion, torch.nn.utils)


def guard() -> None:
    """Let torch's fusers ask the layer first: one with an attribute ``unfusable`` that is not empty is refused.

    >>> guard()  # a second time is one too many, and does nothing
    >>> import batchnorm as bn
    >>> layer = bn.BatchNorm2d(8, activation="relu").eval()
    >>> torch.nn.utils.fuse_conv_bn_eval(torch.nn.Conv2d(3, 8, 3).eval(), layer)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse_conv_bn_eval: BatchNorm2d applies relu after it normalises, which the fused \
layer would not; use bn.fold, which keeps it

    Only these two functions are wrapped, in the places where torch keeps them. Other layers, and ours that are nothing
    but BN, go through unchanged.
    """
    for name in FUSERS:
        for namespace in NAMESPACES:
            fuse = getattr(namespace, name, None)
            if fuse is not None and not hasattr(fuse, "__wrapped__"):
                setattr(namespace, name, _asking(fuse))


def _asking(fuse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fuse)
    def asking(layer: Any, norm: Any, *arguments: Any, **keywords: Any) -> Any:
        reason = getattr(norm, "unfusable", "")
        if reason:
            raise BatchNormError(
                f"{type(norm).__name__} {reason}, which the fused layer would not", where=fuse.__name__,
                do="use bn.fold, which keeps it",
            )  # fmt: skip
        return fuse(layer, norm, *arguments, **keywords)

    return asking
