"""Single layers for ``convert``: which brick (kind of norm) a layer is, and changing it in place into another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.layers import channel_norms
from batchnorm.layers.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNormBase
from batchnorm.layers.channel_norms import Finish
from batchnorm.layers.domain import OneDomain
from batchnorm.layers.dyt import DyT
from batchnorm.layers.family import make_norm
from batchnorm.layers.filter_response import FilterResponseNorm
from batchnorm.layers.followed import Followed, followed
from batchnorm.layers.frozen import FrozenBatchNorm
from batchnorm.layers.ghost import GhostBatchNorm, SplitBatchNorm
from batchnorm.layers.group_counts import LEAST_VALUES, safe_groups
from batchnorm.layers.masked import MaskedBatchNorm
from batchnorm.layers.renorm import BatchRenorm
from batchnorm.layers.sync import SyncBatchNorm
from batchnorm.records import Change
from batchnorm.transforms.freeze import is_frozen
from batchnorm.transforms.synchronise import LAZY, alike, prepared, trial_batch, trial_shapes

# Bricks with the statistics of batches: between them, gamma, beta and statistics are carried over as they are.
OF_BATCHES = ("batch", "sync", "ghost", "renorm", "frozen", "masked")
# Of these, every batch is treated alike in training too, as long as no other process has a part in it.
ALIKE = ("batch", "sync", "masked")
FROZEN = "it is frozen, and nothing of it is the batch's; unfreeze it first"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
MEMORY = "_before_convert"  # on a layer: the class it had as plain batch norm, and its settings

_KINDS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "batch"),
    **dict.fromkeys((BatchNorm1d, BatchNorm2d, BatchNorm3d, channel_norms.BatchNorm), "batch"),
    **dict.fromkeys((nn.SyncBatchNorm, SyncBatchNorm), "sync"),
    GhostBatchNorm: "ghost",
    SplitBatchNorm: "split",
    BatchRenorm: "renorm",
    FrozenBatchNorm: "frozen",
    MaskedBatchNorm: "masked",
    **dict.fromkeys((nn.GroupNorm, channel_norms.GroupNorm), "group"),
    nn.LayerNorm: "layer",
    **dict.fromkeys((nn.RMSNorm, channel_norms.RMSNorm), "rms"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "instance"),
    **dict.fromkeys((channel_norms.InstanceNorm1d, channel_norms.InstanceNorm2d, channel_norms.InstanceNorm3d,
                     channel_norms.InstanceNorm), "instance"),
    channel_norms.ChannelAffine: "none",
    DyT: "dyt",
    FilterResponseNorm: "filter-response",
}  # fmt: skip
_SWITCHES = ("statistics", "update", "nonfinite", "one_value")
# What a norm has beside tensors, children and hooks; every other attribute is the user's, and stays.
_SETTINGS = {
    "num_features", "eps", "momentum", "affine", "track_running_stats", "num_groups", "num_channels", "alpha_start",
    "normalized_shape", "elementwise_affine", "channel_axis", "virtual_batch_size", "splits", "shuffle", "rmax", "dmax",
    "activation", "negative_slope", "seen", "run_after", "process_group", "_held", "_path", "_was", *_SWITCHES,
}  # fmt: skip


@dataclass(frozen=True)
class SeenShape:
    """The shape of a norm's input in a run: axes of positions (None: unknown or several), and the fewest positions."""

    dims: int | None = None
    positions: int | None = None
    features: bool = True  # whether the channels are axis 1 and the last axis at once, as torch's LayerNorm wants them
    like: Tensor | None = None  # without values: for a norm that has no tensors, the device and dtype of its input


def kind_of(layer: nn.Module) -> str:
    """Return the name of the brick that a layer is; empty if it is none.

    >>> kind_of(nn.BatchNorm2d(4)), kind_of(nn.GroupNorm(1, 4)), kind_of(nn.Linear(1, 1))
    ('batch', 'layer', '')

    A BN layer of a custom class counts as "batch".
    """
    cls = layer._norm if isinstance(layer, Followed) else type(layer)
    if isinstance(layer, nn.GroupNorm) and cls in _KINDS and layer.num_groups == 1:
        return "layer"
    return _KINDS.get(cls, "batch" if isinstance(layer, _BatchNorm) else "")


def channels_of(layer: nn.Module) -> int:
    """Return the number of channels of a norm.

    >>> channels_of(nn.GroupNorm(1, 4)), channels_of(nn.LayerNorm(3)), channels_of(nn.BatchNorm1d(2))
    (4, 3, 2)
    """
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return int(layer.normalized_shape[0])
    return int(layer.num_features)  # type: ignore[arg-type]


def unfit(layer: nn.Module, to: str, seen: SeenShape, measured: bool) -> str:
    """Return why a norm cannot become another brick; empty if it can. ``measured``: there are data for statistics.

    >>> unfit(nn.GroupNorm(2, 4), "batch", SeenShape(), measured=False)
    'a GroupNorm keeps no statistics of batches: give data= to measure them'
    """
    kind, name = kind_of(layer), type(layer).__name__
    if not kind:
        return f"a {name} is none of the bricks"
    if isinstance(layer, _LazyNormBase):
        return LAZY
    if is_frozen(layer):
        return FROZEN
    if is_parametrized(layer):
        return "its parameters are computed from others (parametrised)"
    if isinstance(layer, _BatchNorm):
        return _unfit_of_batches(layer, kind, to) or _degenerate(channels_of(layer), to, seen)
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and (len(layer.normalized_shape) != 1 or not seen.features):
        return f"the {name} normalises the last axes, and a brick has its channels in axis 1"
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and seen.dims is None:
        return f"without an example it is unknown whether the {name}'s last axis is the channels: give one"
    if isinstance(layer, DyT) and layer.channel_axis != 1:
        return f"its channels are axis {layer.channel_axis}, and a brick has them in axis 1"
    if isinstance(layer, FilterResponseNorm) and layer.tau is not None:
        return "another norm has no place for its learned threshold"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "it keeps running statistics, and such an instance norm computes something else in evaluation"
    if to in OF_BATCHES and not measured:
        return f"a {name} keeps no statistics of batches: give data= to measure them"
    if to == "sync":
        return f"a {name} has nothing to synchronise: convert it to batch first"
    return _degenerate(channels_of(layer), to, seen)


def _unfit_of_batches(layer: _BatchNorm, kind: str, to: str) -> str:
    name = type(layer).__name__
    if isinstance(layer, _BatchNormBase) and layer.per_step:
        return "it keeps statistics for every time step"
    if isinstance(layer, OneDomain):
        return "it is a part of a DomainBatchNorm, which calls it as batch norm"
    if kind == "masked" and to not in OF_BATCHES:
        return f"it is called with a mask, and {to} norm takes none"
    if layer.running_mean is None and to in ("frozen", "none", "renorm"):
        return "it has no running statistics"
    if isinstance(layer, _BatchNormBase) and not isinstance(layer, Followed) and type(layer) not in _KINDS:
        cls = type(layer)
        names = ("forward", "_apply_to", "_observe", "_groups")
        if any(getattr(cls, own) is not getattr(_BatchNormBase, own) for own in names):
            return f"{name} is a custom class that overrides parts of batch norm"
    return ""


def _degenerate(channels: int, to: str, seen: SeenShape) -> str:
    """Return why a sample has too few values for a norm without batch statistics."""
    where = "an input of unknown size" if seen.positions is None else f"{seen.positions} position"
    if seen.positions is not None and seen.positions != 1:
        where += "s"
    values = {"group": channels, "layer": channels, "rms": channels, "instance": 1}.get(to)
    if values is None:
        return ""
    values *= seen.positions or 1
    # Where nothing was seen, an image has more than one position as a rule, and instance norm is made for images.
    least = {"rms": 2, "instance": 2 if seen.positions else 1}.get(to, LEAST_VALUES if seen.positions else 2)
    if values >= least:
        return ""
    return (
        f"on {where}, {to} norm has {values} value{'s' * (values != 1)} to normalise at once, and would leave "
        + ("its sign" if to == "rms" else "nothing of the input" if values == 1 else "their signs")
        + ("" if seen.positions else ": give an example that says how many there are")
    )


def children_behind(layer: _BatchNorm) -> tuple[str, ...] | str:
    """Return the children that a user's BN class runs behind the normalisation, or why that is not all.

    >>> class NormAct(nn.BatchNorm1d):
    ...     def __init__(self, channels):
    ...         super().__init__(channels)
    ...         self.act = nn.SiLU()
    ...
    ...     def forward(self, x):
    ...         return self.act(super().forward(x))
    >>> children_behind(NormAct(3)), children_behind(nn.BatchNorm1d(3))
    (('act',), ())

    It is tried, on a small random batch in float64, in training and in evaluation.
    """
    if isinstance(layer, Followed):
        return layer.run_after
    if type(layer) in _KINDS or isinstance(layer, _BatchNormBase):
        return ()
    names = [name for name, _ in layer.named_children()]
    reason = f"{type(layer).__name__} does something else than batch norm followed by the modules in it"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for shape in trial_shapes(layer):
            for order in (names, names[::-1]):
                try:
                    if _runs(layer, order, shape):
                        return tuple(order)
                except Exception as error:
                    reason = f"{type(layer).__name__} could not be tried on a batch: {type(error).__name__}: {error}"
    return reason


def _runs(layer: _BatchNorm, order: list[str], shape: tuple[int, ...]) -> bool:
    twin = prepared(layer)
    x = trial_batch(layer, shape)
    for training in (True, False):
        twin.training = training
        mean, var = (None if t is None else t.clone() for t in (twin.running_mean, twin.running_var))
        taken = (None, None) if training else (mean, var)
        y = F.batch_norm(x, *taken, twin.weight, twin.bias, training or mean is None, 0.0, twin.eps)
        for name in order:
            y = getattr(twin, name)(y)
        if not alike(twin(x.clone()), y):
            return False
    return True


def build(
    layer: nn.Module, to: str, seen: SeenShape, options: dict[str, Any], affine: bool
) -> tuple[nn.Module, list[Any]]:
    """Make the brick that replaces a layer, with its settings and new tensors. Returns it and the settings chosen.

    >>> build(nn.BatchNorm2d(8, eps=0.1), "group", SeenShape(2, 16), {}, True)  # doctest: +ELLIPSIS
    (GroupNorm(4, 8, eps=0.1, affine=True...), [('groups', None, '4 of 2 channels, 32 values each')])
    """
    channels = channels_of(layer)
    chosen: list[Any] = []
    given: dict[str, Any] = {"affine": affine}
    eps = getattr(layer, "eps", None)
    if eps is not None and to not in ("none", "dyt"):
        given["eps"] = eps
    if isinstance(layer, (_BatchNormBase, Finish)):  # these take a residual too, and so must what follows them
        given |= {"activation": layer.activation or "none", "negative_slope": layer.negative_slope}
    if to in OF_BATCHES and isinstance(layer, _BatchNorm):
        given["momentum"] = layer.momentum
        if to != "frozen":
            given["track_running_stats"] = layer.track_running_stats or layer.running_mean is not None
            given |= {name: getattr(layer, name) for name in _SWITCHES if isinstance(layer, _BatchNormBase)}
    if to in OF_BATCHES and given.get("activation") == "none":
        given["activation"] = None
    if to == "rms":
        given["bias"] = affine
    if to == "filter-response":
        given["threshold"] = given.get("activation") == "relu"
        if seen.positions == 1:
            given["learn_eps"] = True
    if to == "dyt" and isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        assert layer.running_var is not None
        size = float((layer.running_var.double() + layer.running_mean.double() ** 2).mean())
        given["alpha_start"] = 1 / math.sqrt(size + layer.eps)  # so that the tanh bends where BN's input is large
        chosen = [("alpha", None, f"{given['alpha_start']:.3g}")]
    if to == "none" and isinstance(layer, _BatchNorm):
        chosen = [("statistics", "running", "in gamma and beta")]
    wished = options.get("groups")
    given |= {name: value for name, value in options.items() if name != "groups"}
    if to == "group":
        groups = safe_groups(channels, wished, seen.positions)
        size = channels // groups
        values = "positions not known" if seen.positions is None else f"{size * seen.positions} values each"
        fewer = f" ({wished} wished)" if wished and groups != wished else ""
        chosen = [("groups", None, f"{groups} of {size} channels, {values}{fewer}")]
        given["groups"] = groups
    if to == "layer" and seen.dims == 0:
        seen = SeenShape(None, seen.positions)  # as one group: the same numbers, whatever is given to it later
    new: Any = make_norm(to, channels, _dims(layer, seen), **given)
    if getattr(new, "activation", None) == "none":
        new.activation = None
    return new, chosen


def _dims(layer: nn.Module, seen: SeenShape) -> int | None:
    if seen.dims is not None:
        return seen.dims if seen.dims <= 3 else None
    return 2 if isinstance(layer, nn.BatchNorm2d) else 3 if isinstance(layer, nn.BatchNorm3d) else None


@torch.no_grad()
def become(
    layer: nn.Module, new: nn.Module, after: tuple[str, ...] = (), complete: bool = False, like: Tensor | None = None
) -> None:
    """Change a layer into another in place: its identity, tensors, hooks, mode, children and owners stay.

    >>> layer = nn.BatchNorm2d(4)
    >>> gamma = layer.weight
    >>> become(layer, nn.GroupNorm(2, 4))
    >>> type(layer).__name__, layer.weight is gamma, list(layer.state_dict())
    ('GroupNorm', True, ['weight', 'bias'])

    ``after`` are the children that run behind it. With ``complete``, a gamma or beta that the layer did not have is
    made; without, the new layer has none either. ``like`` gives device and dtype where the layer has no tensors.
    """
    like = next((t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None), like)
    if like is not None:
        new.to(device=like.device, dtype=like.dtype if like.dtype.is_floating_point else None)
    affine = isinstance(new, channel_norms.ChannelAffine)
    if affine and isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        _fold(layer, new)
    else:
        for name in ("weight", "bias"):
            _hand_over(layer, new, name, complete)
    if isinstance(layer, _BatchNorm) and isinstance(new, _BatchNorm):
        for name in RUNNING:
            if name in new._buffers and getattr(layer, name) is not None:
                new._buffers[name] = getattr(layer, name)
    own = vars(layer)
    memory = own.get(MEMORY)
    if memory is None and kind_of(layer) == "batch":
        memory = (type(layer), {name: own[name] for name in own if name in _SETTINGS})
    kept = {
        name: value
        for name, value in own.items()
        if "_hooks" in name or name in ("training", "_is_full_backward_hook", "_modules")
        or not (name in _SETTINGS or name in vars(new) or name == MEMORY)
    }  # fmt: skip
    own.clear()
    own.update(vars(new))
    own.update(kept)
    if after:
        own["run_after"] = after
    if memory is not None:
        own[MEMORY] = memory
    layer.__class__ = followed(type(new)) if after else type(new)


def _hand_over(layer: nn.Module, new: nn.Module, name: str, complete: bool) -> None:
    """Pass gamma or beta to the new layer, as the same object where it stays a parameter."""
    old: Tensor | None = getattr(layer, name, None)
    if name in new._buffers:
        new._buffers[name] = None if old is None else old.detach()
    elif name in new._parameters and old is not None:
        new._parameters[name] = old if isinstance(old, nn.Parameter) else nn.Parameter(old)
    elif name in new._parameters and not complete:
        new._parameters[name] = None


def _fold(layer: _BatchNorm, new: nn.Module) -> None:
    """Fold the running statistics into gamma and beta."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    scale = torch.rsqrt(layer.running_var.double() + layer.eps)
    scale = scale if layer.weight is None else scale * layer.weight.double()
    shift = -scale * layer.running_mean.double()
    shift = shift if layer.bias is None else shift + layer.bias.double()
    for name, value in (("weight", scale), ("bias", shift)):
        old = getattr(layer, name)
        new._parameters[name] = nn.Parameter(value.to(layer.running_mean.dtype)) if old is None else old
        getattr(new, name).copy_(value)


def plain_again(layer: nn.Module) -> None:
    """Restore the class and settings that a plain batch norm had before it was converted.

    >>> layer = nn.BatchNorm2d(4)
    >>> become(layer, GhostBatchNorm(4))
    >>> plain_again(layer)
    >>> type(layer).__name__, "virtual_batch_size" in vars(layer)
    ('BatchNorm2d', False)
    """
    own = vars(layer)
    settings = own[MEMORY]
    for name in [name for name in own if name in _SETTINGS or name == MEMORY]:
        del own[name]
    layer.__class__, attributes = settings
    own.update(attributes)
    own["affine"] = own["_parameters"]["weight"] is not None


def tensors_of(layer: nn.Module) -> tuple[str, str]:
    """Return the names of a layer's parameters and of its buffers.

    >>> tensors_of(nn.BatchNorm2d(1))
    ('weight, bias', 'running_mean, running_var, num_batches_tracked')
    """
    learns = ", ".join(name for name, p in layer._parameters.items() if p is not None)
    return learns, ", ".join(name for name, b in layer._buffers.items() if b is not None)


def changes_of(path: str, before: tuple[str, str, str], layer: nn.Module, chosen: list[Any]) -> list[Change]:
    """Return the changes of a layer: its class, the settings chosen, and changed sets of parameters and buffers."""
    after = (type(layer).__name__, *tensors_of(layer))
    named = zip(("class", "learns", "keeps"), before, after, strict=True)
    first, *more = [Change(path, what, old or "nothing", new or "nothing") for what, old, new in named]
    return [first, *(Change(path, *each) for each in chosen), *(each for each in more if each.before != each.after)]
