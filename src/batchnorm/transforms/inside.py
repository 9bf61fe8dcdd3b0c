"""``fuse`` for BN classes that contain an activation, such as timm's: replace them by ours with ``activation=``."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.followed import Followed
from batchnorm.transforms.bricks import MEMORY, SeenShape, become, build, children_behind
from batchnorm.transforms.rewrite import activation_of

_DIMENSIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def become_ours(layer: _BatchNorm) -> str:
    """Let a layer that is batch norm followed by the modules in it be one of ours; return why not, if it stays.

    >>> class NormAct(nn.BatchNorm2d):
    ...     __module__ = "mine"
    ...     def __init__(self, channels):
    ...         super().__init__(channels)
    ...         self.act = nn.ReLU()
    ...     def forward(self, x):
    ...         return self.act(super().forward(x))
    >>> layer = NormAct(3)
    >>> become_ours(layer), layer.activation, layer.act, type(layer).__name__
    ('', 'relu', Identity(), 'BatchNorm2d')

    It stays the object it was, with its parameters, its buffers and its hooks. The modules inside run behind the
    normalisation as before; a ReLU, ReLU6 or LeakyReLU that runs first becomes part of it.
    """
    name = type(layer).__name__
    if isinstance(layer, _BatchNormBase) or not isinstance(layer, _DIMENSIONS):
        return f"its class {name} is not torch's"
    after = children_behind(layer)
    if isinstance(after, str):
        return f"its class {name} is not torch's: {after}"
    new, _ = build(layer, "batch", SeenShape(), {}, layer.weight is not None)
    assert isinstance(new, _BatchNormBase)
    plain = type(new)
    become(layer, new, after)
    vars(layer).pop(MEMORY, None)  # without the activation inside, the class it had would be another function
    running = [child for child in after if not _does_nothing(getattr(layer, child))]
    first = getattr(layer, running[0]) if running else None
    does = None if first is None or _hooked(first) else activation_of(first)
    if does is not None and first is not None:
        layer.activation = does[0]  # type: ignore[assignment]
        if does[0] == "leaky_relu":
            layer.negative_slope = does[1]  # type: ignore[assignment]
        layer._modules[running[0]] = nn.Identity().train(first.training)
        running = running[1:]
    if isinstance(layer, Followed):
        layer.run_after = tuple(running)
        if not running:
            del layer.run_after
            layer.__class__ = plain  # type: ignore[assignment]
    return ""


def _does_nothing(module: nn.Module) -> bool:
    return not _hooked(module) and (type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0.0))


def _hooked(module: nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if "_hooks" in name)
