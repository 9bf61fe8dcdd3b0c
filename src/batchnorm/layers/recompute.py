"""``update_once``: activation checkpointing runs a layer twice, and its statistics learn from the first time only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.checks import check_model
from batchnorm.layers.foreign import keeps_statistics, set_statistics, statistics_of

_MEMORY = "_before_recomputation"


def update_once(model: nn.Module) -> nn.Module:
    """Let no BN layer of the model update its running statistics again when a backward pass recomputes it.

    >>> from torch.utils.checkpoint import checkpoint
    >>> model = update_once(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()))
    >>> checkpoint(model, torch.randn(8, 3), use_reentrant=False).sum().backward()
    >>> int(model[1].num_batches_tracked)  # 2 without it
    1

    It changes the model in place (two hooks on every BN layer, torch's own and subclasses too, which copies and pickles
    keep) and returns it. Outputs and gradients are the same; the average is the one that the momentum says.
    """
    check_model(model, "update_once")
    for layer in model.modules():
        if (isinstance(layer, _BatchNorm) or keeps_statistics(layer)) and not updates_once(layer):
            layer.register_forward_pre_hook(_hold)
            # Called also if the layer raises: a recomputation ends with an exception as soon as it has what it needs.
            layer.register_forward_hook(_release, always_call=True)
    return model


def updates_once(layer: nn.Module) -> bool:
    """Whether `update_once` has been here.

    >>> updates_once(nn.BatchNorm1d(2)), updates_once(update_once(nn.BatchNorm1d(2)))
    (False, True)
    """
    return _hold in layer._forward_pre_hooks.values()


def has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has forward hooks, besides those of `update_once`, which do nothing outside of training.

    >>> has_hooks(update_once(nn.BatchNorm1d(2)))
    False
    """
    hooks = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    return any(hook not in (_hold, _release) for hook in hooks)


def in_backward() -> bool:
    """Whether a backward pass is under way.

    >>> in_backward()
    False
    """
    return torch._C._current_graph_task_id() != -1


def _hold(layer: nn.Module, arguments: Any) -> None:
    """Let a recomputation write into copies: a checkpoint counts the tensors, so they have to be there."""
    if not torch.compiler.is_compiling() and in_backward():
        held = statistics_of(layer)
        setattr(layer, _MEMORY, held)
        set_statistics(layer, {name: tensor.clone() for name, tensor in held.items()})


def _release(layer: nn.Module, arguments: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and _MEMORY in layer.__dict__:
        set_statistics(layer, layer.__dict__.pop(_MEMORY))
