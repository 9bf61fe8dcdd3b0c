"""torch's ``fuse_conv_bn_eval`` reads the numbers of a BN layer only, so layers of ours that do more refuse it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn.utils import fusion

from batchnorm.errors import BatchNormError

_OWN: dict[str, Callable[..., Any]] = {}  # torch's functions as they were, by name


def guard() -> None:
    """Let torch's fusers ask the layer first: one with an attribute ``unfusable`` that is not empty is refused.

    >>> import torch
    >>> guard()  # a second time is one too many, and does nothing
    >>> import batchnorm as bn
    >>> layer = bn.BatchNorm2d(8, activation="relu").eval()
    >>> torch.nn.utils.fuse_conv_bn_eval(torch.nn.Conv2d(3, 8, 3).eval(), layer)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse_conv_bn_eval: BatchNorm2d applies relu after it normalises, which the fused \
layer would not; use bn.fold, which keeps it

    Only these two functions change. They stay the objects they are and get other code, because a program may have
    imported them by name before it met a layer of ours. Other layers, and ours that are nothing but BN, go through.
    """
    for name, asking in (("fuse_conv_bn_eval", _conv), ("fuse_linear_bn_eval", _linear)):
        fuse = getattr(fusion, name, None)
        if not isinstance(fuse, FunctionType) or fuse.__code__.co_freevars:
            continue
        own = vars(fuse).get("__wrapped__")  # which inspect.signature shows; there already if this module is reloaded
        if own is None:
            own = FunctionType(fuse.__code__, fuse.__globals__, name, fuse.__defaults__)
            own.__kwdefaults__, own.__annotations__ = fuse.__kwdefaults__, fuse.__annotations__
            vars(fuse)["__wrapped__"] = own
            fuse.__code__, fuse.__defaults__, fuse.__kwdefaults__ = asking.__code__, None, None
        _OWN[name] = own


# Their code runs inside torch's module, so they import what they need.
def _conv(*arguments: Any, **keywords: Any) -> Any:
    from batchnorm.layers.torch_fusion import ask

    return ask("fuse_conv_bn_eval", *arguments, **keywords)


def _linear(*arguments: Any, **keywords: Any) -> Any:
    from batchnorm.layers.torch_fusion import ask

    return ask("fuse_linear_bn_eval", *arguments, **keywords)


def ask(fuser: str, *arguments: Any, **keywords: Any) -> Any:
    """Call torch's fuser as it was, unless the BN layer among its arguments does more than that fuser reads.

    >>> import torch
    >>> ask("fuse_conv_bn_eval", torch.nn.Conv2d(3, 8, 3).eval(), bn=torch.nn.BatchNorm2d(8).eval())
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    """
    for norm in (*arguments[1:], *keywords.values()):
        reason = getattr(norm, "unfusable", "")
        if reason:
            raise BatchNormError(
                f"{type(norm).__name__} {reason}, which the fused layer would not", where=fuser,
                do="use bn.fold, which keeps it",
            )  # fmt: skip
    return _OWN[fuser](*arguments, **keywords)
