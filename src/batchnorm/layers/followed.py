"""``Followed``: a norm with the modules behind it inside, as model libraries write BN with its activation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Followed(nn.Module):
    """What `convert` makes of a layer that normalises and then runs its own children, ``drop`` and ``act`` say.

    >>> import torch
    >>> layer = followed(nn.GroupNorm)(2, 4)
    >>> layer.act, layer.run_after = nn.ReLU(), ("act",)
    >>> bool(layer(torch.randn(3, 4, 5)).min() == 0), isinstance(layer, nn.GroupNorm), list(layer.state_dict())
    (True, True, ['weight', 'bias'])

    It is of the norm's class, with the norm's ``state_dict`` keys and the children where they were.
    """

    run_after: tuple[str, ...] = ()  # names of children, in the order in which they run
    _norm: type[nn.Module]

    def forward(self, input: Tensor, *more: Any, **named: Any) -> Any:
        """Normalise, then run the children.

        >>> import torch
        >>> followed(nn.GroupNorm)(1, 2)(torch.tensor([[1.0, 3.0]])).round()
        tensor([[-1.,  1.]], grad_fn=<RoundBackward0>)
        """
        y = super().forward(input, *more, **named)  # type: ignore[misc]  # the norm's
        for name in self.run_after:
            y = getattr(self, name)(y)
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (self._norm,), self.__getstate__()  # type: ignore[no-untyped-call]


_MADE: dict[type[nn.Module], Any] = {}  # one class for each, so that copies are of the same


def followed(norm: type[nn.Module]) -> Any:
    """Return the class of norms of a class that have modules behind them.

    >>> followed(nn.GroupNorm).__name__, followed(nn.GroupNorm) is followed(nn.GroupNorm)
    ('FollowedGroupNorm', True)
    """
    if norm not in _MADE:
        _MADE[norm] = type(f"Followed{norm.__name__}", (Followed, norm), {"_norm": norm, "__module__": __name__})
    return _MADE[norm]


def _empty(norm: type[nn.Module]) -> nn.Module:
    cls = followed(norm)
    made: nn.Module = cls.__new__(cls)
    return made
