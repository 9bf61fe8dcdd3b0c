"""Run a changed model with the discrete choices of the original: what it sorts, selects, thresholds and rounds.

A detector sorts boxes by scores, and a keypoint network selects what exceeds a threshold. Where two scores are equal up
to rounding, rounding decides, and outputs change their order or their number though the function is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchnorm.nested import tensors_in

Result = TypeVar("Result")
Within = AbstractContextManager[Any]
Near = Callable[[list[Tensor], list[Tensor]], bool]
_ROUNDING = frozenset({"aten::floor", "aten::ceil", "aten::round", "aten::trunc", "aten::sign", "aten::heaviside"})


class _Parted(BaseException):  # so that no model catches it
    """Raised if the two functions choose from numbers that differ by more than rounding."""


def with_same_choices(
    first: Callable[[Within], Result], second: Callable[[Within], Result], near: Near
) -> tuple[Result, Result] | None:
    """Run two functions, the second with the choices of the first; None unless both choose from nearly equal numbers.

    >>> import torch
    >>> from functools import partial
    >>> a, b = torch.tensor([1.0, 1.0 + 1e-6]), torch.tensor([1.0 + 1e-6, 1.0])
    >>> def argmax(of, within):
    ...     with within:
    ...         return int(of.argmax())
    >>> with_same_choices(partial(argmax, a), partial(argmax, b), lambda x, y: torch.allclose(x[0], y[0])), b.argmax()
    ((1, 1), tensor(0))

    A choice is an operation that makes whole or truth values of real ones, such as a comparison or the indices of a
    sort, or one that rounds. ``near`` is given the real numbers from which each choice was made in both runs. Each
    function gets a context manager, to enter for what is to be observed: the run of a model, and nothing around it.
    """
    noted: dict[Any, deque[_Choice]] = {}
    one = first(_Noting(noted))
    if not noted:
        return None
    try:
        two = second(_Repeating(noted, near))
    except _Parted:
        return None
    return None if any(noted.values()) else (one, two)


_Choice = tuple[list[Tensor], list[Tensor]]  # from what, and what


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, noted: dict[Any, deque[_Choice]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _copies(_real(args, kwargs))  # before an operation in place changes them
        result = func(*args, **(kwargs or {}))
        made = _chosen(func, given, result)
        if made:
            self.noted.setdefault(_key(func, given), deque()).append((given, _copies(made)))
        return result


class _Repeating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, noted: dict[Any, deque[_Choice]], near: Near) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted, self.near = noted, near

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _copies(_real(args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = _chosen(func, given, result)
        waiting = self.noted.get(_key(func, given))
        if not made or not waiting:
            return result
        was, choice = waiting.popleft()
        if not self.near(was, given) or len(choice) != len(made):
            raise _Parted
        for now, then in zip(made, choice, strict=True):
            if now.shape != then.shape:
                now.resize_(then.shape)
            now.copy_(then)
        return result


def _real(args: Any, kwargs: Any) -> list[Tensor]:
    return [t for t in tensors_in(args, kwargs or {}) if t.dtype.is_floating_point]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def _chosen(func: Any, given: list[Tensor], result: Any) -> list[Tensor]:
    """The choice that an operation made; None if it made none."""
    if not given:
        return []
    rounds = func._schema.name.rstrip("_") in _ROUNDING
    return [t for t in tensors_in(result) if rounds or not (t.dtype.is_floating_point or t.dtype.is_complex)]


def _key(func: Any, given: list[Tensor]) -> Any:
    return (str(func), *(tuple(t.shape) for t in given))
