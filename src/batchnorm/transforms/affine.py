"""BN with fixed statistics as ``scale * x + shift``, and merging that into convolutions and linear layers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.channel_norms import Finish
from batchnorm.layers.domain import OneDomain
from batchnorm.layers.recompute import has_hooks

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR = (nn.Linear,)
_BUFFERS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Affine:
    """``scale * x + shift`` per channel, in float64 on the CPU."""

    scale: Tensor
    shift: Tensor

    @property
    def finite(self) -> bool:
        """Whether all values are finite.

        >>> Affine(torch.tensor([1.0]), torch.tensor([float("nan")])).finite
        False
        """
        return bool(self.scale.isfinite().all() and self.shift.isfinite().all())


def same(a: Affine, b: Affine) -> bool:
    """Whether two are equal.

    >>> same(Affine(torch.ones(2), torch.zeros(2)), Affine(torch.ones(2), torch.zeros(2)))
    True
    """
    return torch.equal(a.scale, b.scale) and torch.equal(a.shift, b.shift)


@dataclass(frozen=True)
class New:
    """New parameters for a layer; they are written only when all parameters of a fold are valid."""

    layer: nn.Module
    name: str
    weight: Tensor
    bias: Tensor


class Finished(Finish):
    """The residual and activation of a fused layer whose normalisation was folded away.

    >>> Finished(activation="relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def _normalize(self, input: Tensor) -> Tensor:
        return input


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a BN layer: torch's, ours, or the frozen class of a detection library.

    >>> is_norm(nn.SyncBatchNorm(3)), is_norm(nn.GroupNorm(1, 3))
    (True, False)
    """
    if isinstance(module, _BatchNorm):
        return True
    # torchvision, detectron2, timm and the detection models of transformers each have a class of their own.
    return "FrozenBatchNorm" in type(module).__name__ and all(name in module._buffers for name in _BUFFERS)


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes what torch's convolution or linear layer does, with weights of its own.

    >>> is_plain(nn.Conv2d(3, 4, 1)), is_plain(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)))
    (True, False)
    """
    if not isinstance(module, (*CONVOLUTIONS, *TRANSPOSED, *LINEAR)):
        return False
    if is_parametrized(module) or "weight" not in module._parameters or list(module.children()):
        return False
    return all(_from_torch(module, name) for name in ("forward", "_conv_forward"))


def _from_torch(module: nn.Module, name: str, homes: tuple[str, ...] = ("torch.nn.modules.",)) -> bool:
    """Whether a method is torch's own, not replaced by a subclass or a patch."""
    if name in vars(module):
        return False
    home = next((kind.__module__ for kind in type(module).__mro__ if name in vars(kind)), homes[0])
    return home.startswith(homes)


def axes_of(layer: nn.Module) -> int:
    """How many axes a layer's input and output have if axis 1 is that of the channels; 0 if any number.

    >>> axes_of(nn.Conv2d(3, 4, 1)), axes_of(nn.Linear(3, 4)), axes_of(nn.BatchNorm2d(3))
    (4, 2, 0)
    """
    if isinstance(layer, LINEAR):
        return 2
    return len(layer.kernel_size) + 2 if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) else 0


def unfit(norm: Any) -> str:
    """Why a BN layer is not a fixed scale and shift in evaluation; empty if it is one.

    >>> unfit(nn.BatchNorm1d(3, track_running_stats=False))
    'it has no running statistics: it depends on the batch in evaluation too'
    """
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics: it depends on the batch in evaluation too"
    known = ("torch.nn.modules.", "batchnorm.")
    same = all(_from_torch(norm, name, known) for name in ("forward", "_apply_to", "_groups"))
    if isinstance(norm, _BatchNorm) and not same and finish_of(norm) is None:
        return f"its class {type(norm).__name__} has a forward of its own"
    if not isinstance(norm, _BatchNorm) and not _is_affine(norm):
        return f"its class {type(norm).__name__} has a forward of its own"
    if isinstance(norm, OneDomain):
        return "it holds one domain of several, and another may be chosen"
    if isinstance(norm, _BatchNormBase) and norm.statistics == "batch":
        return "it is set to use the batch's statistics"
    if isinstance(norm, _BatchNormBase) and norm.update:
        return "it is set to update its statistics in evaluation too"
    if norm.running_mean.dim() != 1:
        return "it has statistics for every time step"
    if is_parametrized(norm):
        return "its gamma or beta is parametrised"
    if has_hooks(norm):
        return "it has hooks, which would be lost"
    return ""


def finish_of(norm: Any) -> nn.Module | None:
    """Return what a BN layer of a user's class does after BN, if that is to run its submodules in turn.

    >>> class BatchNormAct(nn.BatchNorm2d):
    ...     def __init__(self, channels):
    ...         super().__init__(channels)
    ...         self.act = nn.SiLU()
    ...     def forward(self, x):
    ...         return self.act(super().forward(x))
    >>> finish_of(BatchNormAct(3))
    Sequential(
      (act): SiLU()
    )

    Whether it is so is measured, in float64, on random numbers: the class's source is not read.
    """
    children = dict(norm.named_children())
    if not children or "forward" in vars(norm):
        return None
    return nn.Sequential(OrderedDict(children)) if _is_affine(norm) else None


def _is_affine(norm: Any) -> bool:
    """Whether a layer is a scale and a shift and then its submodules in turn, as measured."""
    axes = next((n for kind, n in ((nn.BatchNorm3d, 5), (nn.BatchNorm1d, 2)) if isinstance(norm, kind)), 4)
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, len(norm.running_mean), *[3] * (axes - 2), generator=generator, dtype=torch.float64)
    ones = [1] * (axes - 2)
    try:
        with torch.no_grad():
            layer = copy.deepcopy(norm).double().eval()
            affine, rest = affine_of(layer), nn.Sequential(OrderedDict(layer.named_children()))
            expected = rest(x * affine.scale.view(1, -1, *ones) + affine.shift.view(1, -1, *ones))
            return torch.allclose(layer(x.clone()), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    except Exception:  # it wants other arguments, or is on another device: not a class that we can tell
        return False


def affine_of(norm: Any) -> Affine:
    """Return what a BN layer does in evaluation.

    >>> layer = nn.BatchNorm1d(1, eps=0.0)
    >>> _ = layer.running_var.fill_(4.0)
    >>> affine_of(layer)
    Affine(scale=tensor([0.5000], dtype=torch.float64), shift=tensor([0.], dtype=torch.float64))
    """
    mean, var, weight, bias = (
        None if t is None else t.detach().double().cpu()
        for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    assert mean is not None
    assert var is not None
    scale = torch.rsqrt(var + getattr(norm, "eps", 1e-5))  # some frozen layers have it in their code
    scale = scale if weight is None else scale * weight
    shift = -scale * mean
    return Affine(scale, shift if bias is None else shift + bias)


def scaled_outputs(layer: Any, name: str, affine: Affine) -> New:
    """Return the weights with which ``layer(x)`` becomes ``scale * layer(x) + shift``.

    >>> new = scaled_outputs(nn.Linear(1, 1, bias=False), "fc", Affine(torch.tensor([2.0]), torch.tensor([3.0])))
    >>> new.bias
    tensor([3.], dtype=torch.float64)
    """
    scale = affine.scale.double()
    if is_norm(layer):
        gamma, beta = _numbers(layer.weight), _numbers(layer.bias)
        gamma = torch.ones_like(scale) if gamma is None else gamma
        return New(layer, name, gamma * scale, (0.0 if beta is None else beta * scale) + affine.shift)
    weight, bias = _numbers(layer.weight), _numbers(layer.bias)
    assert weight is not None
    ones = [1] * (weight.dim() - 2)
    if isinstance(layer, TRANSPOSED):  # (in, out / groups, ...): the groups' outputs stand side by side
        groups, (inputs, width) = layer.groups, weight.shape[:2]
        by_group = weight.reshape(groups, inputs // groups, width, *weight.shape[2:])
        scaled = (by_group * scale.view(groups, 1, width, *ones)).reshape(weight.shape)
    else:
        scaled = weight * scale.view(-1, 1, *ones)
    return New(layer, name, scaled, (0.0 if bias is None else bias * scale) + affine.shift.double())


def scaled_inputs(layer: Any, name: str, affine: Affine) -> New:
    """Return the weights with which ``layer(x)`` becomes ``layer(scale * x + shift)``.

    >>> fc = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(fc.weight)
    >>> new = scaled_inputs(fc, "fc", Affine(torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0])))
    >>> new.weight.tolist(), new.bias.tolist()
    ([[2.0, 3.0]], [9.0])
    """
    weight, bias = _numbers(layer.weight), _numbers(layer.bias)
    assert weight is not None
    groups = getattr(layer, "groups", 1)
    # (out, in / groups, ...): the outputs of a group read that group's inputs.
    by_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    scale, shift = (t.double().view(groups, 1, -1, *[1] * (weight.dim() - 2)) for t in (affine.scale, affine.shift))
    added = (by_group * shift).flatten(2).sum(2).reshape(-1)
    return New(layer, name, (by_group * scale).reshape(weight.shape), added if bias is None else bias + added)


def _numbers(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().double().cpu()


def lost_in(new: New) -> str:
    """Why new parameters do not fit the layer's dtype; empty if they do.

    >>> lost_in(New(nn.Linear(1, 1).half(), "fc", torch.full((1, 1), 1e6), torch.zeros(1)))
    'the weights of fc would not fit in float16'
    """
    old: Any = new.layer.weight
    dtype = torch.float32 if old is None else old.dtype
    if bool(new.weight.to(dtype).isfinite().all() and new.bias.to(dtype).isfinite().all()):
        return ""
    given: tuple[Tensor | None, ...] = (old, cast(Any, new.layer).bias)
    if not all(bool(t.detach().isfinite().all()) for t in given if t is not None):
        return f"the weights of {new.name} are not finite"
    return f"the weights of {new.name} would not fit in {str(dtype).removeprefix('torch.')}"


def write(new: New) -> None:
    """Write new parameters into their layer, in place where they exist; add a bias if there is none.

    >>> fc = nn.Linear(1, 1, bias=False)
    >>> write(New(fc, "fc", torch.ones(1, 1), torch.ones(1)))
    >>> fc.weight.item(), fc.bias.item()
    (1.0, 1.0)
    """
    layer: Any = new.layer
    for name, value in (("weight", new.weight), ("bias", new.bias)):
        old = getattr(layer, name)
        if old is not None:
            with torch.no_grad():
                old.copy_(value)
            continue
        like = layer.weight if layer.weight is not None else layer.running_mean
        fresh = value.to(like.device, like.dtype)
        if name in layer._buffers:
            setattr(layer, name, fresh)
        else:
            setattr(layer, name, nn.Parameter(fresh, requires_grad=like.requires_grad))
    if is_norm(layer) and hasattr(layer, "affine"):
        layer.affine = True
