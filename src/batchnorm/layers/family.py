"""The family as interchangeable bricks: one table, and ``make_norm`` that builds a layer from a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, overload

from torch import nn
from torch.nn.utils import parametrizations, parametrize
from typing_extensions import Unpack

from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.layers import channel_norms
from batchnorm.layers.group_counts import safe_groups
from batchnorm.layers.options import MakeOptions
from batchnorm.reference import FAMILY, Scheme

_POSITIONS = {0: "(N, C)", 1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}
_OWN = {"N": "sample", "G": "group of channels", "C": "channel"}


@dataclass(frozen=True)
class Brick:
    """One row of the table: what a norm computes, what it keeps, when to take it, where it is defined.

    >>> BRICKS["group"].statistics
    'mean and variance per sample and group of channels'

    ``scheme`` is the reference's, where the reference has one. ``parameters`` and ``state`` are the names of what
    the layer learns and of the buffers it keeps, with its default options. ``depends`` says when the output for one
    example depends on the other examples of its batch: "training" or "never". ``home`` is "module:class";
    ``build(channels, dims, of, options)`` makes the layer.
    """

    name: str
    statistics: str
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    depends: str
    use_when: str
    home: str
    build: Callable[[int, int | None, nn.Module | None, dict[str, Any]], nn.Module]
    scheme: Scheme | None = None

    def present(self) -> bool:
        """Whether the module that defines the layer is installed.

        >>> BRICKS["batch"].present()
        True
        """
        return find_spec(self.home.partition(":")[0]) is not None


@overload
def make_norm(
    norm: str,
    channels: int,
    dims: int | None = 2,
    *,
    of: nn.Module | None = None,
    **options: Unpack[MakeOptions],
) -> nn.Module: ...
@overload
def make_norm(
    norm: Callable[..., nn.Module],
    channels: int,
    dims: int | None = 2,
    *,
    of: nn.Module | None = None,
    **options: Any,
) -> nn.Module: ...
def make_norm(
    norm: str | Callable[..., nn.Module],
    channels: int,
    dims: int | None = 2,
    *,
    of: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Make a norm for inputs (N, C, *positions) by its name in `BRICKS`, so that a network is written once.

    >>> make_norm("batch", 64, activation="relu").__class__.__name__
    'BatchNorm2d'
    >>> make_norm("group", 64)  # doctest: +ELLIPSIS
    GroupNorm(32, 64, eps=1e-05, affine=True...)
    >>> block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity())
    >>> block[1] = make_norm("weight", 8, of=block[0], activation="relu")

    ``dims`` is the number of position axes (0 for (N, C), 2 for images), or None for any. ``of`` is the layer that
    the norm follows: "weight" normalises that layer's weight in place, and needs it; the others only see to it that
    the channels agree. So a network that may be given any name passes ``of`` always. "masked" has to know what is
    padding: from the network, or from `batchnorm.use_mask` around it.

    ``activation`` (none, relu, relu6, leaky_relu with ``negative_slope``, silu) goes with every brick; with one, every
    brick's ``forward(x, residual=r)`` adds ``r`` before it, and the ``state_dict`` keys are the same as without. All
    other ``options`` are the brick's own: ``eps``, ``affine``, ``groups`` for "group", ``virtual_batch_size`` for
    "ghost". Where torch has the class and no activation is asked for, the layer is torch's own.

    In place of a name, a callable makes the layer: ``make_norm(partial(nn.GroupNorm, 8), 64)`` calls it with the
    channels and the options. Its activation, if it takes no ``activation`` itself, is put behind it (then the keys
    begin with ``norm.``).
    """
    _check(norm, channels, dims, of)
    if callable(norm):
        return _foreign(norm, channels, options)
    brick = find_brick(norm)
    where = f"make_norm({brick.name!r})"
    try:
        return brick.build(channels, dims, of, options)
    except BatchNormError as error:
        raise BatchNormError(error.problem, where=error.where or where, do=error.do) from None
    except TypeError as error:  # an option that the layer does not have
        named = ", ".join(options) or "none"
        raise BatchNormError(f"{error} (options given: {named})", where=where, do="give options of its own") from error


def table() -> tuple[Brick, ...]:
    """Return the rows of the family's table, one for each brick.

    >>> [row.name for row in table() if row.depends == "training"]
    ['batch', 'sync', 'ghost', 'renorm', 'masked']
    """
    return tuple(BRICKS.values())


# ---- What each brick is built of ---------------------------------------------------------------------------


def _ours(home: str, channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    """Build a class of our own that takes any number of positions; its module is imported now and not before."""
    module, _, name = home.partition(":")
    layer: nn.Module = getattr(import_module(module), name)(channels, **options)
    return layer


def _batch(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    home = "batchnorm.layers.channel_norms:BatchNorm"
    if dims is not None:
        home = f"batchnorm.layers.batch:BatchNorm{max(dims, 1)}d"
    return _ours(home, channels, dims, of, options)


def _group(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    groups = options.pop("groups", None)
    safe = safe_groups(channels, positions=1 if dims == 0 else None)
    if groups is None:
        groups = safe
    elif not isinstance(groups, int) or groups < 1 or channels % groups:
        raise BatchNormError(
            f"{channels} channels do not fall into {groups} groups",
            do=f"use a divisor of {channels}, or leave groups out for {safe}",
        )
    if dims == 0 and channels == groups:
        raise BatchNormError(
            f"on (N, C), {groups} groups of {channels} channels have one value each, and would give the bias "
            "whatever the input",
            do="use fewer groups" if channels > 1 else 'use "batch" or "none"',
        )
    return _torchs(nn.GroupNorm, channel_norms.GroupNorm, groups, channels, options=options)


def _layer(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    if dims == 0 and channels == 1:
        raise BatchNormError(
            "on (N, 1), a sample has one value, and the layer would give the bias whatever the input",
            do='use "batch" or "none"',
        )
    if dims == 0 and not _finishes(options):
        return nn.LayerNorm(channels, **_renamed(options, "affine", "elementwise_affine"))
    # One group is all of a sample: layer norm, with gamma and beta for channels, in either memory layout.
    return _torchs(nn.GroupNorm, channel_norms.GroupNorm, 1, channels, options=options)


def _instance(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    if dims == 0:
        raise BatchNormError(
            "on (N, C) there is one value for each sample and channel, and instance norm would leave nothing of it",
            do='use "layer" or "batch"',
        )
    options.setdefault("affine", True)
    if dims is None:
        return channel_norms.InstanceNorm(channels, **options)
    if dims == 1:
        return _torchs(nn.InstanceNorm1d, channel_norms.InstanceNorm1d, channels, options=options)
    # The gradients of torch's own may be wrong where a size is 1 (docs/upstream.md).
    return (channel_norms.InstanceNorm2d if dims == 2 else channel_norms.InstanceNorm3d)(channels, **options)


def _rms(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    if dims == 0 and not _finishes(options) and not options.get("bias"):
        options.pop("bias", None)
        return nn.RMSNorm(channels, **{"eps": 1e-5, **_renamed(options, "affine", "elementwise_affine")})
    return channel_norms.RMSNorm(channels, **options)


def _weight(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    """Normalise the weight of the layer before; what is left to do behind it is a bias, if it has none."""
    if of is None:
        raise BatchNormError(
            "weight normalisation is of a weight, not of an activation", do="pass the layer before it: of=conv"
        )
    if not isinstance(getattr(of, "weight", None), nn.Parameter) or parametrize.is_parametrized(of, "weight"):
        what = "a weight that is parametrised already" if parametrize.is_parametrized(of) else "no weight of its own"
        raise BatchNormError(
            f"the layer before, {type(of).__name__}, has {what}", do="pass a plain nn.Conv or nn.Linear"
        )
    axis = 0
    if getattr(of, "transposed", False):
        axis = 1  # there the weight is (in, out / groups, ...)
        if of.groups != 1:
            raise BatchNormError(
                "the units of a grouped transposed convolution share an axis of its weight, so each has no norm of "
                "its own",
                do="use groups=1, or another norm",
            )
    bare = not _finishes(options) and not options
    after: nn.Module = nn.Identity()
    if of.bias is None or not bare:  # made first, so that an option it does not have leaves `of` as it was
        options = {"device": of.weight.device, "dtype": of.weight.dtype, **options}
        after = channel_norms.ChannelAffine(channels, weight=False, bias=of.bias is None, **options)
    parametrizations.weight_norm(of, "weight", dim=axis)  # g starts as the norm: the function is what it was
    return after


def _none(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    affine = options.pop("affine", False)
    if not _finishes(options) and not affine and not options:
        return nn.Identity()
    return channel_norms.ChannelAffine(channels, weight=affine, bias=affine, **options)


def _filter_response(channels: int, dims: int | None, of: nn.Module | None, options: dict[str, Any]) -> nn.Module:
    # Where there may be one position only, eps has to be learned.
    options.setdefault("learn_eps", not dims)
    return _ours("batchnorm.layers.filter_response:FilterResponseNorm", channels, dims, of, options)


def _torchs(torchs: type[nn.Module], ours: type[nn.Module], *sizes: int, options: dict[str, Any]) -> nn.Module:
    return (ours if _finishes(options) else torchs)(*sizes, **options)


def _finishes(options: dict[str, Any]) -> bool:
    """Whether something is to follow the norm; if not, the options that speak of it are gone."""
    if options.get("activation") is None:
        options.pop("activation", None)
        options.pop("negative_slope", None)
        return False
    return True


def _renamed(options: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    return {after if name == before else name: value for name, value in options.items()}


def _foreign(make: Callable[..., nn.Module], channels: int, options: dict[str, Any]) -> nn.Module:
    finish: dict[str, Any] = {name: options[name] for name in ("activation", "negative_slope") if name in options}
    try:
        takes = "activation" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # something without a signature, such as a builtin
        takes = False
    if not takes:
        options = {name: value for name, value in options.items() if name not in finish}
    layer = make(channels, **options)
    if not isinstance(layer, nn.Module):
        raise BatchNormError(
            f"the callable gave a {type(layer).__name__}", where="make_norm", do="give one that returns an nn.Module"
        )
    return layer if takes or not _finishes(finish) else channel_norms.Activated(layer, **finish)


def find_brick(name: str, where: str = "make_norm") -> Brick:
    """Look a brick up by its name, written as one likes, or say what it may have been.

    >>> find_brick("Filter_Response").name
    'filter-response'
    >>> find_brick("grup", "convert")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: convert: there is no norm 'grup'; did you mean 'group'? Choose one of batch, ...
    """
    plain = name.lower().replace("_", "-") if isinstance(name, str) else ""
    if plain in BRICKS:
        return BRICKS[plain]
    near = did_you_mean(plain, BRICKS, "")
    raise BatchNormError(
        f"there is no norm {name!r}",
        where=where,
        do=(f"{near} Choose" if near else "choose") + f" one of {', '.join(BRICKS)}",
    )


def _check(norm: object, channels: object, dims: object, of: nn.Module | None) -> None:
    def refuse(problem: str, do: str) -> None:
        raise BatchNormError(problem, where="make_norm", do=do)

    if not isinstance(norm, str) and not callable(norm):
        refuse(f"a norm is a name or a callable, got {norm!r}", f"choose one of {', '.join(BRICKS)}")
    if isinstance(norm, nn.Module):
        refuse(
            f"got a layer, {type(norm).__name__}, that is made already", "give its class, or a function that makes it"
        )
    if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
        refuse(f"channels is {channels!r}", "give a whole number from 1 up")
    if dims is not None and (isinstance(dims, bool) or dims not in _POSITIONS):
        known = ", ".join(f"{number} for {shape}" for number, shape in _POSITIONS.items())
        refuse(f"dims, the number of position axes, is {dims!r}", f"use {known}, or None for any")
    if of is not None:
        given = getattr(of, "out_channels", getattr(of, "out_features", channels))
        if given != channels:
            refuse(f"the layer before gives {given} channels, and the norm is for {channels}", "make them equal")


# ---- The table ---------------------------------------------------------------------------------------------


def _describe(scheme: Scheme) -> str:
    what = "mean and variance" if scheme.center else "mean square"
    if scheme.source == "weight":
        return f"{what} of the weight, per unit"
    return f"{what} per {' and '.join(_OWN[letter] for letter in scheme.own)}"


_AFFINE = ("weight", "bias")
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def _row(
    name: str,
    use_when: str,
    home: str,
    build: Callable[[int, int | None, nn.Module | None, dict[str, Any]], nn.Module] | None = None,
    statistics: str = "",
    parameters: tuple[str, ...] = _AFFINE,
    state: tuple[str, ...] = (),
    depends: str = "never",
    scheme: Scheme | None = None,
) -> Brick:
    scheme = FAMILY.get(name, scheme)
    if not statistics and scheme is not None:
        statistics = _describe(scheme)
    build = build or partial(_ours, home)
    return Brick(name, statistics, parameters, state, depends, use_when, home, build, scheme)


_ROWS = (
    _row(
        "batch", "batches of 16 and more a device, drawn at random: the default for images",
        "batchnorm.layers.batch:BatchNorm2d", _batch, state=_RUNNING, depends="training",
    ),
    _row(
        "sync", "the batch is split over devices and each share is small",
        "batchnorm.layers.sync:SyncBatchNorm", statistics="mean and variance per channel, over all devices",
        state=_RUNNING, depends="training",
    ),
    _row(
        "ghost", "the batch is very large: statistics of small parts of it generalise better",
        "batchnorm.layers.ghost:GhostBatchNorm", statistics="mean and variance per channel and part of the batch",
        state=_RUNNING, depends="training",
    ),
    _row(
        "renorm", "batches are small or not drawn at random, and evaluation must match training",
        "batchnorm.layers.renorm:BatchRenorm", statistics="mean and variance per channel, held near the running ones",
        state=_RUNNING, depends="training",
    ),
    _row(
        "frozen", "fine-tuning with few examples, from a network trained with batch norm",
        "batchnorm.layers.frozen:FrozenBatchNorm", statistics="none of its own: fixed ones per channel",
        parameters=(), state=(*_RUNNING, *_AFFINE),
    ),
    _row(
        "masked", "sequences or images padded to one size; it needs the mask, in its forward or by `use_mask`",
        "batchnorm.layers.masked:MaskedBatchNorm", statistics="mean and variance per channel, padding left out",
        state=_RUNNING, depends="training",
    ),
    _row(
        "group", "small batches, detection, segmentation: needs no other example", "torch.nn:GroupNorm", _group,
    ),
    _row(
        "layer", "transformers and recurrent networks; examples of any length", "torch.nn:GroupNorm", _layer,
    ),
    _row(
        "instance", "style transfer and image generation, where the contrast of an image is to go",
        "batchnorm.layers.channel_norms:InstanceNorm2d", _instance,
    ),
    _row(
        "rms", "as layer norm, with less to compute: large language models",
        "batchnorm.layers.channel_norms:RMSNorm", _rms, parameters=("weight",),
    ),
    _row(
        "weight", "noise between examples must not enter: reinforcement learning, generators; pass of=",
        "torch.nn.utils.parametrizations:weight_norm", _weight, parameters=(),
    ),
    _row("none", "the baseline", "torch.nn:Identity", _none, statistics="none", parameters=()),
    _row(
        "dyt", "transformers without statistics", "batchnorm.layers.dyt:DyT",
        statistics="none: a learned tanh", parameters=("weight", "bias", "alpha"),
    ),
    _row(
        "filter-response", "convolutions with batches of one; it brings its own activation",
        "batchnorm.layers.filter_response:FilterResponseNorm", _filter_response,
        parameters=("weight", "bias", "tau"), scheme=Scheme(own="NC", source="sample", center=False),
    ),
)  # fmt: skip

BRICKS: dict[str, Brick] = {row.name: row for row in _ROWS}
