"""The certificate of a verb: the same outputs, before and after, on the example and on random inputs like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.graph import call_with
from batchnorm.nested import fresh, tensors_in
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

    The difference counts relative to the largest output; of outputs that are not real numbers (labels, masks), the
    share that differs counts. Both models begin every run with the same random state. A random input that the model
    itself does not accept is left out. `NotEquivalent` names the first module, among those that ``unchanged`` says
    should give the same, where the two part. Neither model is touched.
    """
    run = forward or call_with
    allowed = _allowed(before) if tolerance is None else tolerance
    worst, share, compared = 0.0, 0.0, 0
    for number in range(more + 1):
        given = example if number == 0 else like(example, number)
        try:
            old = _outputs(before, given, run)
        except Exception:
            if number == 0:
                raise  # the model's own mistake, in its own words
            continue
        if number == 0:
            _check_telling(old, verb)
        try:
            new = _outputs(after, given, run)
        except Exception as error:
            raise NotEquivalent(
                f"the changed model raises {type(error).__name__}: {error}", where=verb, do=_KEPT
            ) from error  # fmt: skip
        _same_kind(old, new, verb)
        if tolerance is None:
            allowed = max([allowed, *(TOLERANCE.get(t.dtype, 0.0) for t in old)])
        absolute, relative = difference(old, new)
        worst, share, compared = max(worst, absolute), max(share, relative), compared + 1
        if not relative <= allowed:
            place = _parting(before, after, given, run, allowed, unchanged)
            raise NotEquivalent(
                f"the outputs would differ by {absolute:.3g} ({relative:.2g} of the largest, allowed: {allowed:g})"
                + (f"; they part at {place}" if place else ""),
                where=verb,
                do=f"{_KEPT}; allow more with tolerance= only if you know why they differ",
            )
    return Certificate(worst, share, allowed, compared)


_KEPT = "the model was left as it was"


def difference(old: list[Tensor], new: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference, absolute and as a share of the largest number.

    >>> difference([torch.tensor([1.0, 4.0])], [torch.tensor([1.0, 3.0])])
    (1.0, 0.25)
    """
    absolute = relative = 0.0
    for a, b in zip(old, new, strict=True):
        if a.numel() == 0:
            continue
        a, b = (torch.view_as_real(t.resolve_conj()) if t.dtype.is_complex else t for t in (a, b))
        exact = not a.dtype.is_floating_point
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        apart = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        absolute = max(absolute, apart)
        if exact:
            relative = max(relative, 1.0 - float(same.double().mean()))
            continue
        largest = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0
        relative = max(relative, apart / largest if largest else (float("inf") if apart else 0.0))
    return absolute, relative


def like(example: Any, seed: int) -> Any:
    """Return random numbers of the same shapes, means and deviations; whole numbers stay, for they may be indices.

    >>> like((torch.full((2, 3), 7.0), torch.arange(3)), seed=0)[1]
    tensor([0, 1, 2])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        if not t.dtype.is_floating_point or t.numel() == 0:
            return t.clone()
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        wide = t.detach().double().cpu()
        deviation = wide.std() if t.numel() > 1 and float(wide.std()) > 0 else torch.tensor(1.0, dtype=torch.float64)
        return torch.empty_like(t).copy_(noise * deviation + wide.mean())  # with the same memory format

    return fresh(example, draw)


def _allowed(model: nn.Module) -> float:
    """What the coarsest numbers that the model computes with allow."""
    return max((TOLERANCE.get(t.dtype, 0.0) for t in [*model.parameters(), *model.buffers()]), default=0.0)


def _outputs(model: nn.Module, given: Any, run: Forward) -> list[Tensor]:
    """The tensors of one run. It leaves no trace in the model and the random states: the next begins as it did."""
    with torch.inference_mode(False), torch.no_grad(), untouched(model):
        return [t.detach().clone() for t in tensors_in(run(model, fresh(given)))]


def _check_telling(outputs: list[Tensor], verb: str) -> None:
    """Refuse to certify by outputs that would be the same whatever happened."""
    if not any(t.numel() for t in outputs):
        raise BatchNormError(
            "the model returned no numbers, so there is nothing to compare", where=verb,
            do="give forward=, a function of the model and the example that returns tensors",
        )  # fmt: skip
    if not any(bool(t.isfinite().any()) for t in outputs):
        raise BatchNormError(
            "the model's outputs are NaN or infinite on the example before anything is changed", where=verb,
            do="give an example on which it works, or look for bad weights or running statistics",
        )  # fmt: skip


def _same_kind(old: list[Tensor], new: list[Tensor], verb: str) -> None:
    kinds = [[(tuple(t.shape), t.dtype) for t in side] for side in (old, new)]
    if kinds[0] != kinds[1]:
        raise NotEquivalent(f"the outputs would be {kinds[1]} instead of {kinds[0]}", where=verb, do=_KEPT)


def _parting(
    before: nn.Module, after: nn.Module, given: Any, run: Forward, allowed: float, unchanged: Callable[[str], bool]
) -> str:
    """The path of the first module that gives something else in the two models."""
    earlier: dict[str, list[list[Tensor]]] = {}
    apart: list[str] = []

    def note(path: str, result: Any) -> None:
        earlier.setdefault(path, []).append([t.clone() for t in tensors_in(result)])

    def compare(path: str, result: Any) -> None:
        if apart or not earlier.get(path):
            return
        was, now = earlier[path].pop(0), tensors_in(result)
        if [t.shape for t in was] != [t.shape for t in now] or difference(was, now)[1] > allowed:
            apart.append(path)

    for model, look in ((before, note), (after, compare)):
        with untouched(model):  # which removes the hooks, too
            for path, module in model.named_modules():
                if path and unchanged(path):
                    module.register_forward_hook(
                        lambda module, args, result, path=path, look=look: look(path, result)  # type: ignore[misc]
                    )
            _outputs(model, given, run)
    return apart[0] if apart else ""
