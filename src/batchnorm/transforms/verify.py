"""The certificate of a verb: equal outputs before and after, on the example and on random inputs like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.graph import check_forward, check_ready
from batchnorm.nested import few_samples, tensors_in
from batchnorm.preserve import untouched
from batchnorm.records import Certificate
from batchnorm.transforms.choices import with_same_choices
from batchnorm.transforms.outputs import (
    KINKS,
    ROUNDED,
    TOLERANCE,
    Forward,
    by_rounding,
    difference,
    dtypes_inside,
    kinds_of,
    like,
    outputs_of,
)
from batchnorm.transforms.stages import stage


def check_tolerance(tolerance: Any, where: str) -> None:
    """Raise for a tolerance that nothing could be within, or that is not a number.

    >>> check_tolerance(float("nan"), "fold")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fold: tolerance is nan; give a share of the largest output, 0 or more, such as 1e-4
    """
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and tolerance >= 0):
        raise BatchNormError(
            f"tolerance is {tolerance!r}", where=where, do="give a share of the largest output, 0 or more, such as 1e-4"
        )


def check_arguments(model: Any, forward: Any, tolerance: Any, where: str) -> None:
    """Raise for inputs on which a verb cannot watch a run and compare outputs.

    >>> check_arguments(nn.ReLU(), "model(x)", None, "fold")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fold: forward is 'model(x)'; give a function of the model and of what it is \
called with
    """
    check_ready(model, where)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BatchNormError(
                f"{name} is on the meta device, without numbers", where=where, do="load the model's weights first"
            )
    check_forward(forward, where)
    check_tolerance(tolerance, where)


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
    itself does not accept, or for which it gives NaN, is left out. `NotEquivalent` names the first module, among those
    that ``unchanged`` says should give the same, where the two part. Neither model is touched.

    Outputs that are empty, all zero, or only labels, would be the same whatever happened: then what those modules make
    is compared in their place. NaN equals nothing: an example for which the model as it was gives NaN is refused, and
    so is a model that does not give the same twice. In some networks rounding alone moves the outputs by more than the
    tolerance. So they may differ by `KINKS` times as much as they do when every parameter moves by a unit in the last
    place, up to `ROUNDED`.
    """
    check_tolerance(tolerance, verb)
    run = forward or call_with
    allowed = _allowed(before) if tolerance is None else tolerance
    worst, share, compared, telling, what, rounding = 0.0, 0.0, 0, False, "outputs", 0.0
    few = example if any(module.training for module in before.modules()) else few_samples(example, 2)
    for number in range(more + 1):
        stage(f"comparing outputs on input {number + 1} of {more + 1}")
        given = example if number == 0 else like(few, number)
        try:
            old = outputs_of(before, given, run)
        except Exception:
            if number == 0:
                raise  # the model's own mistake, in its own words
            few = example  # it may want as many samples as there are
            try:
                given = like(example, number)
                old = outputs_of(before, given, run)
            except Exception:
                continue
        if number == 0:
            _check_numbers(old, before, given, run, verb)
        elif any(_has_nan(t) for t in old):
            continue
        try:
            new = outputs_of(after, given, run)
        except Exception as error:
            raise NotEquivalent(
                f"the changed model raises {type(error).__name__}: {error}", where=verb, do=_KEPT
            ) from error  # fmt: skip
        if tolerance is None:
            allowed = max([allowed, *(TOLERANCE.get(t.dtype, 0.0) for t in old)])
        absolute, relative = difference(old, new) if kinds_of(old) == kinds_of(new) else (math.inf, math.nan)
        if not relative <= allowed and tolerance is None:
            allowed = max([allowed, *(TOLERANCE.get(d, 0.0) for d in dtypes_inside(before, given, run))])
        if not relative <= allowed:
            _check_steady(old, before, given, run, verb)
            found = _difference_by_same_choices(before, after, given, run, allowed)
            if found is not None:
                (absolute, relative), what = found, "outputs, with what is sorted and selected as before,"
        if not relative <= allowed and tolerance is None:
            rounding = max(rounding, by_rounding(before, given, run, old, relative / KINKS))
            if relative <= min(KINKS * rounding, ROUNDED):
                allowed, what = relative, "outputs, which rounding moves as far,"
        worst, share, compared = max(worst, absolute), max(share, relative), compared + 1
        telling = telling or any(_tells(t) for t in old)
        if not relative <= allowed:
            _same_kind(old, new, verb)
            place = _parting(before, after, given, run, allowed, unchanged)
            raise NotEquivalent(
                f"the outputs would differ by {absolute:.3g} ({relative:.2g} of the largest, allowed: {allowed:g})"
                + (f"; they part at {place}" if place else "")
                + (f"; rounding moves them by {rounding:.2g}" if rounding > TOLERANCE[torch.float32] else ""),
                where=verb,
                do=f"{_KEPT}; "
                + ("give model.double(), in which they can be compared" if KINKS * rounding > ROUNDED
                   else "allow more with tolerance= only if you know why they differ"),
            )  # fmt: skip
    if not telling and allowed < float("inf"):
        return _inside(before, after, example, run, allowed, unchanged, verb)
    return Certificate(worst, share, allowed, compared, what)


def _difference_by_same_choices(
    before: nn.Module, after: nn.Module, given: Any, run: Forward, allowed: float
) -> tuple[float, float] | None:
    """The difference of outputs if the changed model sorts and selects as the other does; None if that does not help.

    Equal scores (of boxes, of keypoints) fall in one order or another by rounding. What the two models choose from has
    to be equal within the tolerance, too.
    """

    def near(old: list[Tensor], new: list[Tensor]) -> bool:
        return difference(old, new)[1] <= allowed

    stage("comparing outputs with the same choices")
    try:
        found = with_same_choices(
            lambda within: outputs_of(before, given, run, within),
            lambda within: outputs_of(after, given, run, within),
            near,
        )  # fmt: skip
    except Exception:  # choices that do not fit what the other model makes, or an operation that cannot be observed
        return None
    if found is None or kinds_of(found[0]) != kinds_of(found[1]):
        return None
    apart = difference(*found)
    return apart if apart[1] <= allowed else None


_KEPT = "the model was left as it was"
_SILENT = "empty, zeros or labels"  # a detector may find nothing in the example


def _allowed(model: nn.Module) -> float:
    """What the coarsest numbers that the model computes with allow."""
    return max((TOLERANCE.get(t.dtype, 0.0) for t in [*model.parameters(), *model.buffers()]), default=0.0)


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and bool(tensor.isnan().any())


def _tells(tensor: Tensor) -> bool:
    """Whether an output would show that a function changed: zeros may be zero for any function, labels the same."""
    real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return real and bool(((tensor != 0) & tensor.isfinite()).any())


def _check_numbers(outputs: list[Tensor], model: nn.Module, given: Any, run: Forward, verb: str) -> None:
    """Raise if the outputs cannot be compared."""
    if not outputs:
        raise BatchNormError(
            "the model returned no tensors, so there is nothing to compare", where=verb,
            do="give forward=, a function of the model and the example that returns tensors",
        )  # fmt: skip
    numbers = [t for t in outputs if t.numel()]
    if any(_has_nan(t) for t in numbers) or (numbers and not any(bool(t.isfinite().any()) for t in numbers)):
        raise BatchNormError(
            "the model's outputs are NaN or infinite on the example before anything is changed"
            + _first_nan(model, given, run), where=verb,
            do="give an example on which it works, or look for bad weights or running statistics",
        )  # fmt: skip


def _first_nan(model: nn.Module, given: Any, run: Forward) -> str:
    """The first module that makes NaN or infinity, in words."""
    found: list[str] = []
    with untouched(model):  # which removes the hooks, too
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):

                def look(module: nn.Module, args: Any, result: Any, path: str = path) -> None:
                    if not found and not all(bool(t.isfinite().all()) for t in tensors_in(result)):
                        found.append(f" (the first to make them is {path}, a {type(module).__name__})")

                module.register_forward_hook(look)
        outputs_of(model, given, run)
    return "".join(found)


def _check_steady(old: list[Tensor], model: nn.Module, given: Any, run: Forward, verb: str) -> None:
    """Raise for a model whose output differs from run to run, before the change is blamed for it."""
    again = outputs_of(model, given, run)
    if [t.shape for t in old] != [t.shape for t in again] or difference(old, again)[0] > 0:
        raise BatchNormError(
            "the model as it is gives something else when it is run again with the same input and the same random "
            "state, so there is nothing to compare with", where=verb,
            do="switch off what is random in it (a Generator of its own, a counter), or give forward= that does",
        )  # fmt: skip


def _inside(
    before: nn.Module,
    after: nn.Module,
    given: Any,
    run: Forward,
    allowed: float,
    unchanged: Callable[[str], bool],
    verb: str,
) -> Certificate:
    """Compare what the modules inside make, where the outputs are empty, zeros or labels and tell nothing."""
    absolute = relative = 0.0
    seen = False
    for path, was, now in _pairs(before, after, given, run, unchanged):
        if [t.shape for t in was] != [t.shape for t in now]:
            continue  # what one of them returns besides is not known to be the same
        found = difference(was, now)
        absolute, relative = max(absolute, found[0]), max(relative, found[1])
        seen = seen or any(_tells(t) for t in was)
        if not relative <= allowed:
            raise NotEquivalent(
                f"what {path} makes would differ by {found[0]:.3g} ({found[1]:.2g} of the largest, allowed: "
                f"{allowed:g}); the outputs of the model, {_SILENT}, do not show it",
                where=verb,
                do=_KEPT,
            )
    if not seen:
        raise BatchNormError(
            f"the outputs are {_SILENT}, and so is what the layers inside make: nothing shows whether the function "
            "is kept", where=verb, do="give an example, or forward=, with outputs that are not zero",
        )  # fmt: skip
    return Certificate(absolute, relative, allowed, 1, f"the outputs are {_SILENT}; layers inside")


def _same_kind(old: list[Tensor], new: list[Tensor], verb: str) -> None:
    if kinds_of(old) != kinds_of(new):
        raise NotEquivalent(f"the outputs would be {kinds_of(new)} instead of {kinds_of(old)}", where=verb, do=_KEPT)


def _parting(
    before: nn.Module, after: nn.Module, given: Any, run: Forward, allowed: float, unchanged: Callable[[str], bool]
) -> str:
    """The path of the first module that gives something else in the two models."""
    for path, was, now in _pairs(before, after, given, run, unchanged):
        if [t.shape for t in was] != [t.shape for t in now] or not difference(was, now)[1] <= allowed:
            return path
    return ""


def _pairs(
    before: nn.Module, after: nn.Module, given: Any, run: Forward, unchanged: Callable[[str], bool]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """What the modules that should give the same give in the two models, in the order of the changed one's calls."""
    earlier: dict[str, list[list[Tensor]]] = {}
    pairs: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def note(path: str, result: Any) -> None:
        earlier.setdefault(path, []).append([t.clone() for t in tensors_in(result)])

    def compare(path: str, result: Any) -> None:
        if earlier.get(path):
            pairs.append((path, earlier[path].pop(0), [t.clone() for t in tensors_in(result)]))

    for model, look in ((before, note), (after, compare)):
        with untouched(model):  # which removes the hooks, too
            for path, module in model.named_modules():
                if path and unchanged(path) and not isinstance(module, torch.jit.ScriptModule):
                    module.register_forward_hook(
                        lambda module, args, result, path=path, look=look: look(path, result)  # type: ignore[misc]
                    )
            outputs_of(model, given, run)
    return pairs
