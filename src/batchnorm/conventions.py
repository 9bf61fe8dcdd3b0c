"""What other frameworks call the parts of a BN layer, and how they count: Keras and flax, from and to torch.

>>> import torch, batchnorm as bn
>>> given = {"gamma": [2.0], "beta": [1.0], "moving_mean": [3.0], "moving_variance": [4.0]}
>>> ours = from_keras({"weights": given, "config": {"momentum": 0.99, "epsilon": 1e-3}})
>>> layer = bn.BatchNorm1d(**ours["settings"])
>>> layer.load_state_dict({name: torch.as_tensor(array) for name, array in ours["state"].items()})
<All keys matched successfully>
>>> layer.eps, layer.momentum
(0.001, 0.01)

Three conventions differ. **Momentum**: Keras and flax keep ``momentum`` of the old average at each step, torch takes
``momentum`` of the new batch: one is 1 minus the other (0.99 is torch's 0.01; torch's default 0.1 is 0.9). **eps**:
Keras and flax add 1e-3 and 1e-5, torch 1e-5; a network keeps the one it was trained with. **Variance**: all normalise
with the biased variance of the batch; in the moving average Keras 3 and flax keep the biased one too, torch the
unbiased one, which is n / (n - 1) of it for batches of n values per channel (examples x positions). Give that ``count``
to convert it; without it the variance stays as it is, which is off by 1 / n. (The fused kernel of TensorFlow that older
versions of Keras used for images keeps the unbiased variance: leave ``count`` out for those.)

Dictionaries hold NumPy arrays, as the frameworks name and nest them; no framework is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.errors import BatchNormError
from batchnorm.kernels.storage import check_memory

Array = npt.NDArray[Any]
_STATE = ("weight", "bias", "running_mean", "running_var")
_KERAS = ("gamma", "beta", "moving_mean", "moving_variance")


def from_keras(layer: Mapping[str, Any], *, count: float | None = None) -> dict[str, dict[str, Any]]:
    """Translate a BatchNormalization of Keras; return torch's state and the arguments of a layer.

    >>> given = {"moving_mean": [3.0], "moving_variance": [4.0]}  # made with center=False, scale=False
    >>> ours = from_keras({"weights": given, "config": {"momentum": 0.9}}, count=5)
    >>> ours["state"]["running_var"], ours["settings"]
    (array([5.]), {'num_features': 1, 'eps': 0.001, 'momentum': 0.1, 'affine': False})

    ``weights``: by name, or the list of ``layer.get_weights()``; ``config``: what ``layer.get_config()`` returns, of
    which momentum and epsilon are used (Keras's defaults where they are missing), and center and scale to read a list.
    """
    where = "from_keras"
    weights, config = _part(layer, "weights", where), dict(layer.get("config") or {})
    if not isinstance(weights, Mapping):
        wanted = [config.get("scale", True), config.get("center", True), True, True]
        names = [name for name, there in zip(_KERAS, wanted, strict=True) if there]
        if len(weights) != len(names):
            raise BatchNormError(
                f"there are {len(weights)} weights for {', '.join(names)}", where=where, do="give the layer's config"
            )
        weights = dict(zip(names, weights, strict=True))
    arrays = _renamed(weights, dict(zip(_KERAS, _STATE, strict=True)), where)
    return _torchs(arrays, config.get("momentum", 0.99), config.get("epsilon", 1e-3), count, where)


def to_keras(layer: _BatchNorm | Mapping[str, Any], *, count: float | None = None) -> dict[str, dict[str, Any]]:
    """Translate a torch layer, or what `from_keras` returns, into weights and config of a BatchNormalization.

    >>> import torch
    >>> theirs = to_keras(torch.nn.BatchNorm2d(1))
    >>> [*theirs["weights"]], theirs["config"]
    (['gamma', 'beta', 'moving_mean', 'moving_variance'], \
{'axis': 1, 'momentum': 0.9, 'epsilon': 1e-05, 'center': True, 'scale': True})

    ``layer.set_weights(list(theirs["weights"].values()))`` loads them. The axis is torch's: for images stored with
    their channels last, it is -1.
    """
    state, momentum, eps = _of_torch(layer, count, "to_keras")
    config = {"axis": 1, "momentum": momentum, "epsilon": eps, "center": "bias" in state, "scale": "weight" in state}
    weights = {theirs: state[ours] for theirs, ours in zip(_KERAS, _STATE, strict=True) if ours in state}
    return {"weights": weights, "config": config}


def from_flax(layer: Mapping[str, Any], *, count: float | None = None) -> dict[str, dict[str, Any]]:
    """Translate a BatchNorm of flax; return torch's state and the arguments of a layer.

    >>> given = {"params": {"scale": [2.0], "bias": [1.0]}, "batch_stats": {"mean": [3.0], "var": [4.0]}}
    >>> ours = from_flax({**given, "settings": {"momentum": 0.9}})
    >>> [*ours["state"]][:4], ours["settings"]["momentum"], ours["settings"]["eps"]
    (['weight', 'bias', 'running_mean', 'running_var'], 0.1, 1e-05)

    ``params`` and ``batch_stats`` are the layer's entries of the model's variables; ``settings`` are momentum and
    epsilon as the module was given them (flax's defaults, 0.99 and 1e-5, where they are missing).
    """
    where = "from_flax"
    if not isinstance(layer, Mapping):
        raise BatchNormError(
            f"the layer is a {type(layer).__name__}", where=where, do="give its params and batch_stats in a dictionary"
        )
    settings = dict(layer.get("settings") or {})
    arrays = _renamed(dict(layer.get("params") or {}), {"scale": "weight", "bias": "bias"}, where)
    means = {"mean": "running_mean", "var": "running_var"}
    arrays |= _renamed(_part(layer, "batch_stats", where), means, where)
    return _torchs(arrays, settings.get("momentum", 0.99), settings.get("epsilon", 1e-5), count, where)


def to_flax(layer: _BatchNorm | Mapping[str, Any], *, count: float | None = None) -> dict[str, dict[str, Any]]:
    """Translate a torch layer, or what `from_flax` returns, into params, batch_stats and settings of a BatchNorm.

    >>> import torch
    >>> to_flax(torch.nn.BatchNorm2d(1, affine=False))["settings"]
    {'momentum': 0.9, 'epsilon': 1e-05, 'use_bias': False, 'use_scale': False}
    """
    state, momentum, eps = _of_torch(layer, count, "to_flax")
    names = {"weight": "scale", "bias": "bias"}
    return {
        "params": {theirs: state[ours] for ours, theirs in names.items() if ours in state},
        "batch_stats": {"mean": state["running_mean"], "var": state["running_var"]},
        "settings": {"momentum": momentum, "epsilon": eps, "use_bias": "bias" in state, "use_scale": "weight" in state},
    }


def _torchs(
    arrays: dict[str, Array], momentum: float, eps: float, count: float | None, where: str
) -> dict[str, dict[str, Any]]:
    """Torch's state and settings, from arrays with torch's names and the others' momentum and variance."""
    for name in ("running_mean", "running_var"):
        if name not in arrays:
            raise BatchNormError(f"there is no {name} among the arrays", where=where, do="give the moving averages too")
    channels = arrays["running_mean"].shape
    for name, array in arrays.items():
        if array.shape != channels or array.ndim != 1:
            raise BatchNormError(
                f"{name} has the shape {list(array.shape)}, the mean {list(channels)}", where=where, do="give one layer"
            )
    if not bool((arrays["running_var"] >= 0).all()):  # NaN included
        raise BatchNormError(
            f"the smallest moving variance is {arrays['running_var'].min()}", where=where,
            do="give variances (0 or more): the four arrays may be in another order, or in logarithms",
        )  # fmt: skip
    arrays["running_var"] = _times(arrays["running_var"], _bessel(count, where))
    affine = "weight" in arrays or "bias" in arrays
    if affine:  # torch has both or none
        like = arrays["running_mean"]
        arrays.setdefault("weight", np.ones_like(like))
        arrays.setdefault("bias", np.zeros_like(like))
    state: dict[str, Any] = {name: arrays[name] for name in _STATE if name in arrays}
    state["num_batches_tracked"] = np.array(0)
    settings = {"num_features": channels[0], "eps": float(eps), "momentum": _other(momentum, where), "affine": affine}
    return {"state": state, "settings": settings}


def _of_torch(
    layer: _BatchNorm | Mapping[str, Any], count: float | None, where: str
) -> tuple[dict[str, Array], float, float]:
    """Arrays with torch's names, and momentum, eps and variance as the others have them."""
    if isinstance(layer, _BatchNorm):
        given = {name: getattr(layer, name) for name in _STATE}
        state = {name: value for name, value in given.items() if value is not None}
        momentum, eps = layer.momentum, layer.eps
    else:
        state, settings = dict(_part(layer, "state", where)), dict(layer.get("settings") or {})
        momentum, eps = settings.get("momentum", 0.1), settings.get("eps", 1e-5)
    for name, value in state.items():
        if isinstance(value, Tensor):
            check_memory(value, name, where)
    arrays = {name: _array(value) for name, value in state.items() if name in _STATE}
    if "running_mean" not in arrays or "running_var" not in arrays:
        raise BatchNormError("the layer has no running statistics", where=where, do="use one that tracks them")
    if momentum is None:
        raise BatchNormError(
            "momentum None (every batch weighs the same) has no counterpart", where=where, do="set a momentum first"
        )
    arrays["running_var"] = _times(arrays["running_var"], 1 / _bessel(count, where))
    return arrays, _other(momentum, where), float(eps)


def _part(layer: Mapping[str, Any], name: str, where: str) -> Any:
    if not isinstance(layer, Mapping) or layer.get(name) is None:
        given = ", ".join(map(str, layer)) if isinstance(layer, Mapping) else type(layer).__name__
        raise BatchNormError(f"{name!r} is missing (given: {given})", where=where, do="see the example in its help")
    return layer[name]


def _renamed(arrays: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, value in arrays.items():
        last = str(name).rpartition("/")[2].partition(":")[0]  # Keras calls a weight "block/bn/gamma:0"
        if last not in names:
            raise BatchNormError(f"{name!r} is not a part of this layer", where=where, do=f"use {', '.join(names)}")
        found[names[last]] = _array(value)
    return found


def _array(value: Any) -> Array:
    # Copies: what is translated does not change with the layer it came from.
    if isinstance(value, Tensor):
        return (
            value.detach().cpu().float().numpy().copy()
            if value.element_size() < 4
            else value.detach().cpu().numpy().copy()
        )
    return np.array(value)


def _times(array: Array, by: float) -> Array:
    return (array.astype(np.float64) * by).astype(array.dtype if array.dtype.kind == "f" else np.float64)


def _bessel(count: float | None, where: str) -> float:
    if count is None:
        return 1.0
    if not count > 1:
        raise BatchNormError(f"count is {count!r}", where=where, do="give the values per channel in a batch, 2 or more")
    return count / (count - 1)


def _other(momentum: float, where: str) -> float:
    if not 0 <= momentum <= 1:
        raise BatchNormError(f"momentum is {momentum!r}", where=where, do="use a number between 0 and 1")
    return float(f"{1 - momentum:.12g}")  # 1 - 0.99 is 0.01
