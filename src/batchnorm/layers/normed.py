"""A layer of any class with a norm behind it, in the same place of the model, under the same names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Normed(nn.Module):
    """A layer followed by a norm: what `insert` makes of a layer.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False))
    >>> append_norm(model[0], nn.BatchNorm2d(8))
    >>> model  # doctest: +ELLIPSIS
    Sequential(
      (0): NormedConv2d(
        (layer): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), bias=False)
        (norm): BatchNorm2d(8, eps=1e-05, ...)
      )
    )
    >>> [*model.state_dict()][:2], isinstance(model[0], nn.Conv2d), model[0].weight.shape
    (['0.weight', '0.norm.weight'], True, torch.Size([8, 3, 3, 3]))

    The object stays, and with it all who hold it and its hooks (which now see what the norm makes); it is still of its
    class, its ``state_dict`` has the keys it had and those of ``norm``, and attributes that it is asked for or given
    (``weight``, ``stride``) are the layer's. Inside there are two ordinary layers, so that `trace`, `fold` and others
    see a convolution and a BN layer. In ``named_parameters`` the layer's names have ``layer.`` in front.
    """

    layer: nn.Module
    norm: nn.Module
    _normed: type[nn.Module]
    _rows = False  # whether channels are the last axis, as a linear layer makes them, and all others are positions

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the layer, then the norm.

        >>> import torch
        >>> linear = nn.Linear(3, 4)
        >>> append_norm(linear, nn.BatchNorm1d(4))
        >>> bool(linear(torch.randn(64, 3)).mean(0).abs().max() < 1e-5)
        True
        """
        made = self.layer(*arguments, **keywords)
        return as_rows(self.norm, made) if self._rows else self.norm(made)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if "layer" not in modules:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(modules["layer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        layer = self.__dict__.get("_modules", {}).get("layer")
        if name != "training" and layer is not None and name not in ("layer", "norm") and hasattr(layer, name):
            setattr(layer, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Return torch's dictionary, in which the layer's tensors have the names they always had.

        >>> linear = nn.Linear(3, 4)
        >>> append_norm(linear, nn.BatchNorm1d(4, affine=False, track_running_stats=False))
        >>> list(linear.state_dict())
        ['weight', 'bias']
        """
        state = super().state_dict(*arguments, **keywords)
        prefix = keywords.get("prefix", "")
        inner = f"{prefix}layer."
        mine = [(key, state.pop(key)) for key in [*state] if key.startswith(prefix)]
        for key, value in mine:
            state[prefix + key[len(inner) :] if key.startswith(inner) else key] = value
        return state

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        # torch asks each module for its own and then goes on to its children, with these keys.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if key[len(prefix) :].partition(".")[0] not in ("layer", "norm"):
                state_dict[f"{prefix}layer.{key[len(prefix) :]}"] = state_dict.pop(key)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (self._normed,), self.__getstate__()  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Say nothing: the layer inside says it.

        >>> Normed().extra_repr()
        ''
        """
        return ""


def as_rows(norm: nn.Module, made: Tensor) -> Any:
    """Call a norm with a tensor whose channels are the last axis: every position is a row.

    >>> import torch
    >>> as_rows(nn.BatchNorm1d(4), torch.randn(2, 5, 4)).shape
    torch.Size([2, 5, 4])
    """
    return norm(made.flatten(0, -2)).reshape(made.shape)


def append_norm(layer: nn.Module, norm: nn.Module, rows: bool = False) -> None:
    """Put a norm behind a layer, which stays the same object; with ``rows``, its channels are the last axis.

    >>> conv = nn.Conv2d(3, 8, 3)
    >>> append_norm(conv, nn.BatchNorm2d(8))
    >>> type(conv).__name__
    'NormedConv2d'
    """
    kind = type(layer)
    inner = kind.__new__(kind)
    own, bare = dict(layer.__dict__), nn.Module().__dict__
    inner.__dict__.update({**own, **{name: value for name, value in bare.items() if "_hooks" in name}})
    training = layer.training
    layer.__dict__.clear()
    layer.__dict__.update({**bare, **{name: value for name, value in own.items() if "_hooks" in name}})
    layer.__class__ = normed(kind)
    layer.add_module("layer", inner)
    layer.add_module("norm", norm)
    layer.__dict__["_rows"] = rows
    layer.train(training)


_MADE: dict[type[nn.Module], type[nn.Module]] = {}  # one class for each, so that copies are of the same


def normed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of layers of a kind that have a norm behind them.

    >>> normed(nn.Linear).__name__, issubclass(normed(nn.Linear), nn.Linear)
    ('NormedLinear', True)
    """
    if kind not in _MADE:
        _MADE[kind] = type(f"Normed{kind.__name__}", (Normed, kind), {"_normed": kind, "__module__": __name__})
    return _MADE[kind]


def _empty(kind: type[nn.Module]) -> nn.Module:
    cls = normed(kind)
    return cls.__new__(cls)
