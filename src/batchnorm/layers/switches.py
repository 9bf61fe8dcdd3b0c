"""Context managers that turn the switches of every BN layer of a model, and put them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.layers.batch import _Fast


@contextmanager
def no_update(model: nn.Module) -> Iterator[nn.Module]:
    """Let no running statistic of the model move, whatever mode it is in.

    >>> import torch
    >>> layer = nn.BatchNorm1d(2)
    >>> with no_update(layer):
    ...     y = layer(torch.randn(8, 2))
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0., 0.]), 0)

    It serves torch's own layers as well as ours: for a second forward pass on other data (a GAN's fake images, a
    teacher, a gradient penalty).
    """

    def switches(layer: _BatchNorm) -> dict[str, Any]:
        return {"update": False} if isinstance(layer, _Fast) else {"track_running_stats": False}

    with _turned(model, switches):
        yield model


@contextmanager
def use_batch_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """Normalise with the statistics of each batch, in evaluation mode too; what is updated does not change.

    >>> import torch
    >>> layer = nn.BatchNorm1d(2).eval()
    >>> with use_batch_statistics(layer):
    ...     y = layer(torch.full((8, 2), 5.0))
    >>> bool(y.abs().max() < 1e-3), layer.training, layer.running_mean
    (True, False, tensor([0., 0.]))
    """

    def switches(layer: _BatchNorm) -> dict[str, Any]:
        if isinstance(layer, _Fast):
            return {"statistics": "batch"}
        return {} if layer.training else {"training": True, "track_running_stats": False}

    with _turned(model, switches):
        yield model


@contextmanager
def _turned(model: nn.Module, switches: Callable[[_BatchNorm], dict[str, Any]]) -> Iterator[None]:
    """Set the attributes that ``switches`` names for each layer, and restore them, exceptions included."""
    before: list[tuple[_BatchNorm, dict[str, Any]]] = []
    try:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                new = switches(layer)
                before.append((layer, {name: getattr(layer, name) for name in new}))
                for name, value in new.items():
                    setattr(layer, name, value)
        yield
    finally:
        for layer, old in before:
            for name, value in old.items():
                setattr(layer, name, value)
