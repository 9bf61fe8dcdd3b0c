"""Context managers that leave a model, and the process, as they found them, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model run, in any mode, and put its buffers, modes and hooks and all random states back.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer):
    ...     y = layer.train()(torch.randn(8, 2))
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0., 0.]), 0)
    """
    with ExitStack() as stack:
        for keep in (buffers, modes, hooks):
            stack.enter_context(keep(model))
        stack.enter_context(random_states())
        yield model


@contextmanager
def buffers(model: nn.Module) -> Iterator[None]:
    """Put every buffer back: the same tensor, with the same values.

    >>> layer = nn.BatchNorm1d(1)
    >>> with buffers(layer):
    ...     layer.running_mean = torch.ones(1)
    >>> layer.running_mean
    tensor([0.])
    """
    before = [(module, dict(module._buffers)) for module in model.modules()]
    values: dict[int, tuple[Tensor, Tensor]] = {}
    for _, own in before:
        for tensor in own.values():
            if tensor is not None and id(tensor) not in values and not tensor.is_meta:
                values[id(tensor)] = (tensor, tensor.detach().clone())
    versions = {key: tensor._version for key, (tensor, _) in values.items() if not tensor.is_inference()}
    try:
        yield
    finally:
        for module, own in before:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for key, (tensor, value) in values.items():
                # A version that moved, or one that was never counted, means that the values may have changed. A
                # kernel may write without counting, too, so the values are looked at where that is cheap.
                if versions.get(key) != tensor._version or not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def modes(model: nn.Module) -> Iterator[None]:
    """Put ``training`` back in every module.

    >>> model = nn.Sequential(nn.Dropout().eval(), nn.ReLU())
    >>> with modes(model):
    ...     _ = model.train()
    >>> [module.training for module in model]
    [False, True]
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def hooks(model: nn.Module) -> Iterator[None]:
    """Take away the hooks that were added in between, and put back those that were removed.

    >>> layer = nn.ReLU()
    >>> with hooks(layer):
    ...     _ = layer.register_forward_hook(print)
    >>> len(layer._forward_hooks)
    0
    """
    before = [
        (module, {name: dict(getattr(module, name)) for name in _HOOKS if hasattr(module, name)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, own in before:
            for name, entries in own.items():
                now = getattr(module, name)
                now.clear()
                now.update(entries)


@contextmanager
def random_states() -> Iterator[None]:
    """Put the random states of torch (every device), Python and NumPy back.

    >>> state = torch.get_rng_state()
    >>> with random_states():
    ...     _ = torch.randn(100)
    >>> torch.equal(torch.get_rng_state(), state)
    True
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if used else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
