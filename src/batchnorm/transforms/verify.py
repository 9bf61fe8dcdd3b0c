"""The certificate of a verb: the same outputs, before and after, on the example and on random inputs like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from batchnorm.errors import NotEquivalent
from batchnorm.graph import call_with
from batchnorm.preserve import untouched
from batchnorm.records import Certificate

Forward = Callable[[nn.Module, Any], Any]
# Of the largest output: what rounding may do to a deep network.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def verify(
    before: nn.Module,
    after: nn.Module,
    example: Any,
    *,
    verb: str,
    forward: Forward | None = None,
    tolerance: float | None = None,
    more: int = 2,
    unchanged: Callable[[str], bool] = lambda path: True,
) -> Certificate:
    """Compare two models, each in its mode, on the example and ``more`` random inputs; raise if they differ.

    >>> layer = nn.Linear(3, 2)
    >>> verify(layer, layer, torch.randn(4, 3), verb="nothing").absolute
    0.0

    The difference counts relative to the largest output. `NotEquivalent` names the first module, among those that
    ``unchanged`` says should give the same, where the two part. Neither model is touched.
    """
    run = forward or call_with
    worst, share, allowed = 0.0, 0.0, tolerance or 0.0
    inputs = [example, *(_like(example, seed) for seed in range(more))]
    with torch.no_grad(), untouched(before), untouched(after):
        for given in inputs:
            old, new = (_tensors(run(model, _copy(given))) for model in (before, after))
            _same_kind(old, new, verb)
            if tolerance is None:
                allowed = max([allowed, *(TOLERANCE.get(t.dtype, 0.0) for t in old)])
            absolute, relative = difference(old, new)
            worst, share = max(worst, absolute), max(share, relative)
            if not relative <= allowed:
                place = _parting(before, after, given, run, allowed, unchanged)
                raise NotEquivalent(
                    f"the outputs would differ by {absolute:.3g} ({relative:.2g} of the largest, allowed: {allowed:g})"
                    + (f"; they part at {place}" if place else ""),
                    where=verb,
                    do="the model was left as it was; allow more with tolerance= only if you know why they differ",
                )
    return Certificate(worst, share, allowed, len(inputs))


def difference(old: list[Tensor], new: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference, absolute and as a share of the largest number.

    >>> difference([torch.tensor([1.0, 4.0])], [torch.tensor([1.0, 3.0])])
    (1.0, 0.25)
    """
    absolute = relative = 0.0
    for a, b in zip(old, new, strict=True):
        if a.numel() == 0:
            continue
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        apart = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        largest = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0
        absolute = max(absolute, apart)
        relative = max(relative, apart / largest if largest else (float("inf") if apart else 0.0))
    return absolute, relative


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor) and not t.dtype.is_complex]


def _same_kind(old: list[Tensor], new: list[Tensor], verb: str) -> None:
    kinds = [[(tuple(t.shape), t.dtype) for t in side] for side in (old, new)]
    if kinds[0] != kinds[1]:
        raise NotEquivalent(f"the outputs would be {kinds[1]} instead of {kinds[0]}", where=verb)


def _copy(example: Any) -> Any:
    """A fresh copy: a model may write into what it is given."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, example)


def _like(example: Any, seed: int) -> Any:
    """Random numbers of the same shapes, means and deviations; whole numbers stay, for they may be indices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dtype.is_floating_point or t.numel() == 0:
            return t
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        wide = t.detach().double().cpu()
        deviation = wide.std() if t.numel() > 1 and float(wide.std()) > 0 else torch.tensor(1.0, dtype=torch.float64)
        drawn = torch.empty_like(t)  # with the same memory format
        return drawn.copy_(noise * deviation + wide.mean())

    return tree_map(draw, example)


def _parting(
    before: nn.Module, after: nn.Module, given: Any, run: Forward, allowed: float, unchanged: Callable[[str], bool]
) -> str:
    """The path of the first module that gives something else in the two models."""
    seen: list[list[tuple[str, list[Tensor]]]] = []
    for model in (before, after):
        calls: list[tuple[str, list[Tensor]]] = []

        def note(path: str, calls: list[tuple[str, list[Tensor]]] = calls) -> Any:
            return lambda module, args, result: calls.append((path, [t.clone() for t in _tensors(result)]))

        handles = [m.register_forward_hook(note(path)) for path, m in model.named_modules() if path and unchanged(path)]
        try:
            run(model, _copy(given))
        finally:
            for handle in handles:
                handle.remove()
        seen.append(calls)
    later: dict[str, list[list[Tensor]]] = {}
    for path, tensors in seen[1]:
        later.setdefault(path, []).append(tensors)
    for path, tensors in seen[0]:
        others = later.get(path)
        if not others:
            continue
        other = others.pop(0)
        if [t.shape for t in tensors] != [t.shape for t in other] or difference(tensors, other)[1] > allowed:
            return path
    return ""
