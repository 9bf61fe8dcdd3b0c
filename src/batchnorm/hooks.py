"""Hooks that observe one model: its copies and saved files do not carry them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_CALL = nn.Module._call_impl.__code__
_KINDS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class Hook:
    """A forward hook that is not copied with its module, idle where it was pickled, and not compiled or traced.

    >>> import copy
    >>> layer, seen = nn.Identity(), []
    >>> handle = layer.register_forward_hook(Hook(lambda *what: seen.append(1)))
    >>> other = copy.deepcopy(layer)
    >>> y = other(torch.zeros(1)), layer(torch.zeros(1))
    >>> len(seen), len(other._forward_hooks)  # the copy's did nothing, and took itself away
    (1, 0)

    Without it, ``copy.deepcopy(model)`` for a moving average would copy the whole observation along with the hooks.
    """

    __slots__ = ("_act", "_exported")

    def __init__(self, act: Callable[..., None] | None, exported: bool = False) -> None:
        self._act, self._exported = act, exported

    def __call__(self, module: nn.Module, *what: Any) -> None:
        """Act, unless this is a copy or the module is being compiled or traced (an ``exported`` hook sees exports)."""
        if torch.compiler.is_dynamo_compiling():
            return
        if not self._exported and exporting():
            return
        if self._act is not None:
            self._act(module, *what)
        else:
            _forget(module, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        # A model saved under observation must load where this package is not installed: pickle a standard function
        # that takes any arguments and does nothing.
        return partial, (sys.audit, "hook.gone")


def exporting() -> bool:
    """True while the model is exported, compiled or traced; tensors may then be symbolic.

    >>> exporting()
    False
    """
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _forget(module: nn.Module, hook: Hook) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, value in hooks.items() if value is hook]:
            del hooks[key]
            for kind in _KINDS:
                getattr(module, kind).pop(key, None)


def users_frame() -> int:
    """Return how many frames above the caller the user's code is, for `warnings.warn(stacklevel=)`.

    >>> users_frame()
    1
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        level, frame = level + 1, frame.f_back
    return level


def running_place() -> tuple[str, tuple[nn.Module | None, torch.Tensor | None]]:
    """Return the path of the module that is running in the model that was called, that model, and what it was given.

    >>> class Layer(nn.Module):
    ...     def forward(self, x):
    ...         return running_place()[0]
    >>> nn.Sequential(nn.Identity(), nn.Sequential(Layer()))(torch.zeros(1)), Layer()(torch.zeros(1))
    ('1.0', '')

    A module does not know its path, so this searches the call stack for its callers. That is slow: use it only for
    messages.
    """
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            calls.append(frame.f_locals)
        frame = frame.f_back
    for call in reversed(calls):
        path = next((path for path, module in call["self"].named_modules() if module is calls[0]["self"]), None)
        if path is not None:
            return path, (call["self"], first_tensor([*call["args"], *call["kwargs"].values()]))
    return "", (None, None)


def first_tensor(things: Iterable[Any]) -> torch.Tensor | None:
    """Return the first of some arguments that is a tensor.

    >>> first_tensor((1, torch.tensor(2)))
    tensor(2)
    """
    return next((thing for thing in things if isinstance(thing, torch.Tensor)), None)
