"""Compare gradients and statistics before and after a verb whose result is trained further."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.calling import call_with, failed_in_training, in_training
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.kernels.fallback import readable, readable_gradient
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.nested import few_samples, fresh, tensors_in
from batchnorm.preserve import in_mode, parameters, untouched
from batchnorm.records import Certificate
from batchnorm.transforms.choices import Within, with_same_choices
from batchnorm.transforms.outputs import KINKS, nudge
from batchnorm.transforms.stages import stage

Forward = Callable[[nn.Module, Any], Any]
# Of a tensor's largest number: what rounding may do to a gradient on its way through a deep network.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_SMALL = 1e-2  # a tensor smaller than this share of the largest of its kind counts as if it were that large


@dataclass(frozen=True)
class Step:
    """What one step gave: by kind (outputs, gradients, buffers) and name; None where there is no gradient."""

    kinds: dict[str, dict[str, Tensor | None]]


Finish = Callable[[nn.Module], None]


def step(
    model: nn.Module,
    example: Any,
    run: Forward = call_with,
    finish: Finish | None = None,
    where: str = "",
    within: Within | None = None,
) -> Step:
    """Run forward and backward once, in the model's mode, and leave the model and the random states as they were.

    >>> found = step(nn.Linear(2, 1, bias=False), torch.ones(3, 2))
    >>> {kind: list(named) for kind, named in found.kinds.items()}
    {'outputs': ['output 0'], 'gradients': ['weight', 'input 0'], 'buffers': []}

    The loss is a fixed random combination of all outputs, so that no gradient cancels by symmetry. ``finish`` may
    change the model after the backward pass, before its buffers are read. What a model raises in training mode becomes
    a `BatchNormError` that quotes it.
    """
    leaves: list[Tensor] = []

    def leaf(value: Tensor) -> Tensor:
        if not value.dtype.is_floating_point:
            return value.clone()
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1].clone()  # a model may write into what it is given

    with untouched(model), torch.enable_grad():  # which removes the hooks, too
        _read_rightly(model)
        given = fresh(example, leaf)
        with within or nullcontext():
            made = in_training(model, given, run, where) if model.training else run(model, given)
        outputs = [t for t in tensors_in(made) if t.dtype.is_floating_point]
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sources = {**learning, **{f"input {i}": t for i, t in enumerate(leaves)}}
        draw = torch.Generator().manual_seed(0)
        total: Any = 0.0
        for output in outputs:
            weights = torch.randn(output.shape, generator=draw, dtype=torch.float64).to(output)
            if output.requires_grad:
                total = total + (output * weights).sum()
        found: Any = [None] * len(sources)
        if isinstance(total, Tensor) and sources:
            try:
                with within or nullcontext():
                    found = _gradients(total, list(sources.values()))
            except BatchNormError:
                raise
            except Exception as error:
                if not model.training:
                    raise
                raise failed_in_training(model, error, where) from error
        if finish is not None:
            finish(model)
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return Step(
        {
            "outputs": {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)},
            "gradients": dict(zip(sources, found, strict=True)),
            "buffers": dict(buffers),
        }
    )


def _read_rightly(model: nn.Module) -> None:
    """Hook torch's BN layers so that their gradients are right in every layout (docs/upstream.md)."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, (_BatchNormBase, torch.jit.ScriptModule)):
            module.register_forward_pre_hook(
                lambda module, given: (
                    (readable(given[0]), *given[1:]) if given and isinstance(given[0], Tensor) else None
                )
            )
            module.register_forward_hook(
                lambda module, given, made: readable_gradient(made) if isinstance(made, Tensor) else None
            )


def _gradients(total: Tensor, sources: list[Tensor]) -> list[Tensor | None]:
    try:
        return list(torch.autograd.grad(total, sources, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # Blocks that are recomputed in the old way of torch.utils.checkpoint only know backward().
    before = [source.grad for source in sources]
    try:
        for source in sources:
            source.grad = None
        total.backward()  # type: ignore[no-untyped-call]
        return [source.grad for source in sources]
    finally:
        for source, gradient in zip(sources, before, strict=True):
            source.grad = gradient


def apart(old: Step, new: Step, least: Step | None = None) -> dict[str, tuple[float, float, torch.dtype]]:
    """Return, of every tensor of a step, the largest difference: absolute, and as a share of its largest number.

    >>> a, b = (Step({"gradients": {"w": torch.tensor([1.0, x])}}) for x in (4.0, 3.0))
    >>> apart(a, b)
    {'gradients of w': (1.0, 0.25, torch.float32)}

    A tensor counts as if it were at least as large as that of the same name in ``least``.
    """
    found: dict[str, tuple[float, float, torch.dtype]] = {}
    for kind, named in old.kinds.items():
        sizes = {name: _size(t) for name, t in named.items() if t is not None}
        largest = max(sizes.values(), default=0.0)
        for name, a in named.items():
            b = new.kinds[kind].get(name)
            if a is None and b is None:
                continue
            like = a if a is not None else b
            assert like is not None
            if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
                missing = a is None or b is None
                # A gradient that is missing on one side and zero on the other is the same for an optimiser's user.
                size = _size(like) if missing else float("inf")
                found[f"{kind} of {name}"] = (size, size and float("inf"), like.dtype)
                continue
            if a.numel() == 0:
                continue
            gap = _gap(a, b)
            floor = least.kinds[kind].get(name) if least is not None else None
            scale = max(sizes[name], _SMALL * largest, 0.0 if floor is None else _size(floor))
            found[f"{kind} of {name}"] = (gap, (gap / scale if scale else float("inf")) if gap else 0.0, a.dtype)
    return found


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; where both are NaN, or the same infinity, there is none."""
    if torch.equal(a, b):
        return 0.0
    if a.dtype in (torch.float32, torch.float64):
        gap = float((a - b).abs().max())
        if gap < float("inf"):
            return gap
    x, y = (t.to(torch.complex128 if t.dtype.is_complex else torch.float64) for t in (a, b))
    gap = float((x - y).abs().max())
    if gap == gap:
        return gap
    same = (x == y) | (x.isnan() & y.isnan())
    return float(torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=float("inf")).max())


def verify_gradients(
    before: nn.Module,
    after: nn.Module,
    example: Any,
    *,
    verb: str,
    forward: Forward | None = None,
    tolerance: float | None = None,
    finish: Finish | None = None,
    optional: bool = False,
    twin: nn.Module | None = None,
) -> Certificate | None:
    """Compare a step of two models, in the mode they are in, in training and in evaluation; raise if they differ.

    >>> layer = nn.BatchNorm1d(3)
    >>> print(verify_gradients(layer, layer, torch.randn(8, 3), verb="nothing"))
    gradients differ by at most 0 (0 of the largest) on 1 input; allowed: 0.0001 of the largest

    Compared are the gradients of all parameters and of the inputs, the outputs, and the buffers after the step, with a
    few samples of the example: they tell two functions apart as well as all of them. A tensor's difference counts
    relative to its largest number. Rounding alone can do more than that allows: a value that is zero but for rounding
    falls on the other side of a ReLU's kink, and a share of the gradient with it. So where the difference is above the
    tolerance, the two must give the same to 1e-9 in float64, where this does not happen: then the certificate is that
    of float64. The error of the original's step in its own numbers, or how far that step moves when its parameters
    change by a unit in the last place, is what rounding does; the new step may be `KINKS` times as far away. A gradient
    that is zero but for rounding, as that of a bias before BN, moves by more than itself; float64 alone judges it.
    With ``optional`` None is returned if the model as it was cannot take a step. A ``twin`` is the original in another
    memory layout: how far its step is from the original's is rounding, too.
    """
    run = forward or call_with
    example = _cut(before, example, run)
    worst, share, allowed = 0.0, 0.0, tolerance or 0.0
    exact: tuple[float, float] | None = None  # in float64, where that was needed
    own = {m.training for m in before.modules()}
    ways: list[bool | None] = [True, False] if len(own) == 1 else [None, True, False]
    models = [before, after] if twin is None else [before, after, twin]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(untouched(model))
        for mode in ways:
            if mode is not None:
                for model in models:
                    in_mode(model, mode)
            where = "the mode it is in" if mode is None else "training" if mode else "evaluation"
            stage(f"comparing gradients in {where}")
            # In evaluation no sample depends on another, so one tells as much as several.
            given = _cut(before, example, run, samples=1) if mode is False else example
            try:
                first = step(before, given, run, finish, verb)
            except Exception:
                if optional:
                    return None
                raise
            old, new = _two_steps(before, after, given, run, verb, finish, tolerance, first)
            _check_numbers(old, f"in {where}", verb)
            rounding: _Rounding | None = None
            for name, (absolute, relative, dtype) in apart(old, new).items():
                limit = TOLERANCE.get(dtype, 0.0) if tolerance is None else tolerance
                kind = name.split()[0]
                if not relative <= limit and tolerance is None:
                    if rounding is None:
                        rounding = _Rounding(before, after, given, run, verb, old, finish, twin)
                        if rounding.exact is not None:
                            exact = max(exact or rounding.exact, rounding.exact)
                    limit = max(limit, rounding.limit(kind, name, relative))
                if not relative <= limit:
                    raise NotEquivalent(
                        f"in {where}, {name} would differ by {absolute:.3g} ({relative:.2g} of the largest, allowed: "
                        f"{limit:.2g})",
                        where=verb,
                        do="the model was left as it was; allow more with tolerance= only if you know why they differ",
                    )
                if kind != "outputs":
                    allowed = max(allowed, limit)
                    worst, share = max(worst, absolute), max(share, relative)
    if exact is not None:
        what = f"gradients in float64 (in the model's own numbers: {share:.2g}, as rounding alone moves them)"
        return Certificate(*exact, TOLERANCE[torch.float64], 1, what)
    return Certificate(worst, share, allowed, 1, "gradients")


def _two_steps(
    before: nn.Module,
    after: nn.Module,
    example: Any,
    run: Forward,
    verb: str,
    finish: Finish | None,
    tolerance: float | None = None,
    old: Step | None = None,
) -> tuple[Step, Step]:
    """A step of each model; where outputs differ, the changed one sorts and selects as the other does, if it does."""
    old = old or step(before, example, run, finish, verb)
    new = step(after, example, run, finish, verb)

    def near(was: list[Tensor], now: list[Tensor]) -> bool:
        limits = [TOLERANCE.get(t.dtype, 0.0) if tolerance is None else tolerance for t in was]
        return len(was) == len(now) and all(
            a.shape == b.shape and _gap(a, b) <= limit * _size(a) for a, b, limit in zip(was, now, limits, strict=True)
        )

    outputs = [[t for t in each.kinds["outputs"].values() if t is not None] for each in (old, new)]
    if near(*outputs):
        return old, new
    try:
        found = with_same_choices(
            lambda within: step(before, example, run, finish, verb, within),
            lambda within: step(after, example, run, finish, verb, within),
            near,
        )  # fmt: skip
    except Exception:  # choices that do not fit what the other model makes, or an operation that cannot be observed
        found = None
    return found or (old, new)


def _check_numbers(old: Step, when: str, verb: str) -> None:
    """Raise if there is NaN to compare with, which equals nothing."""
    for kind in ("outputs", "gradients"):
        for name, tensor in old.kinds[kind].items():
            if tensor is not None and bool(tensor.isnan().any()):
                raise BatchNormError(
                    f"{when}, {kind} of {name} are NaN before anything is changed", where=verb,
                    do="give an example on which the model trains, or look for bad weights",
                )  # fmt: skip


def _cut(model: nn.Module, example: Any, run: Forward, samples: int = 4) -> Any:
    """A few samples of the example, if the model can take so few in training mode (one: in evaluation mode)."""
    small = few_samples(example, samples)
    if small is not example:
        try:
            with untouched(model), torch.no_grad():
                run(in_mode(model, samples > 1), fresh(small))
        except Exception:
            return example
    return small


class _Rounding:
    """How far rounding alone moves a step of the original, found out no further than needed.

    First in float64, which also shows that the two models are the same function: the error of a step in the model's own
    numbers is what rounding did to it, and so is the difference of a step in another memory layout. Then, if that does
    not explain a difference, by changing every parameter by a unit in the last place, up to three times.
    """

    def __init__(
        self, before: nn.Module, after: nn.Module, example: Any, run: Forward, verb: str, old: Step,
        finish: Finish | None, twin: nn.Module | None,
    ) -> None:  # fmt: skip
        self.before, self.example, self.run, self.old, self.finish = before, example, run, old, finish
        self.by_kind: dict[str, float] = {}
        self.by_tensor: dict[str, float] = {}
        self.draws = 0
        self.exact: tuple[float, float] | None = None
        found = _in_float64(before, after, example, run, verb, old, finish)
        if found is not None:
            self.exact, wide, narrow = found
            self._note(apart(_like(wide, narrow), narrow))
            if twin is not None:
                self._note(apart(old, step(twin, example, run, finish, verb)))

    def limit(self, kind: str, name: str, needed: float) -> float:
        """Return what is allowed for a tensor, looking further until that is enough."""
        while True:
            found = KINKS * self.by_kind.get(kind, 0.0)
            if self.exact is not None:  # only then: a tensor that is nothing but rounding tells nothing here
                found = max(found, KINKS * self.by_tensor.get(name, 0.0))
            if needed <= found or self.draws == 3:
                return found
            self._note(apart(self.old, _moved_step(self.before, self.example, self.run, self.finish, self.draws)))
            self.draws += 1

    def _note(self, found: dict[str, tuple[float, float, torch.dtype]]) -> None:
        for name, (_, relative, _) in found.items():
            kind = name.split()[0]
            self.by_kind[kind] = max(self.by_kind.get(kind, 0.0), relative if relative < 1 else 0.0)
            self.by_tensor[name] = max(self.by_tensor.get(name, 0.0), relative)


def _like(wide: Step, narrow: Step) -> Step:
    """A step in the types of another."""

    def cast(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or like is None else tensor.to(like.dtype)

    return Step(
        {kind: {name: cast(t, narrow.kinds[kind].get(name)) for name, t in named.items()}
         for kind, named in wide.kinds.items()}
    )  # fmt: skip


def _in_float64(
    before: nn.Module, after: nn.Module, example: Any, run: Forward, verb: str, old: Step, finish: Finish | None
) -> tuple[tuple[float, float], Step, Step] | None:
    """The largest differences of a step in float64, and the step of the original there and in its own numbers.

    None where that cannot be asked. One sample, if the model can train on one: float64 takes several times as long.
    A gradient that is zero has no size to compare with here. What rounding made of it in the model's own numbers has:
    terms of that size, and more, were added up.
    """
    stage("comparing gradients in float64")
    try:
        one = few_samples(example, 1)
        narrow = old
        if one is not example:
            try:
                narrow = step(before, one, run, finish, verb)
                example = one
            except Exception:  # one value per channel
                narrow = old
        wide = [copy.deepcopy(model).double() for model in (before, after)]
        was, now = _two_steps(wide[0], wide[1], double(example), run, verb, finish)
    except Exception:  # an operation without float64
        return None
    worst, share = 0.0, 0.0
    found = apart(was, now, old)
    allowed = limit_in_float64(wide[0], double(example), run, was, found, finish)
    for name, (absolute, relative, dtype) in found.items():
        if not relative <= (allowed if dtype is torch.float64 else TOLERANCE.get(dtype, 0.0)):
            raise NotEquivalent(
                f"in float64, {name} would differ by {absolute:.3g} ({relative:.2g} of the largest)",
                where=verb,
                do="the model was left as it was",
            )
        worst, share = max(worst, absolute), max(share, relative)
    return (worst, share), was, narrow


def limit_in_float64(
    model: nn.Module, example: Any, run: Forward, old: Step, found: dict[str, tuple[float, float, torch.dtype]],
    finish: Finish | None = None,
) -> float:  # fmt: skip
    """Return the share by which a step in float64 may differ: 1e-9, or what rounding does to it, up to 1e-6.

    >>> layer, x = nn.Linear(2, 1).double(), torch.ones(3, 2, dtype=torch.float64)
    >>> limit_in_float64(layer, x, call_with, step(layer, x), {})
    1e-09
    """
    limit = TOLERANCE[torch.float64]
    needed = max((relative for _, relative, dtype in found.values() if dtype is torch.float64), default=0.0)
    if not limit < needed <= 1e-6:
        return limit
    moved = apart(old, _moved_step(model, example, run, finish, 0))
    return max(limit, min(1e-6, KINKS * max((share for _, share, _ in moved.values() if share < 1), default=0.0)))


def _moved_step(before: nn.Module, example: Any, run: Forward, finish: Finish | None, seed: int) -> Step:
    """A step after every parameter was changed by a unit in the last place."""
    stage("measuring what rounding does to gradients")
    with parameters(before):
        nudge(before, example, run, seed)
        return step(before, example, run, finish)


def double(example: Any) -> Any:
    """Return an example with its floating-point tensors in float64.

    >>> double((torch.zeros(1), torch.tensor(3), "text"))
    (tensor([0.], dtype=torch.float64), tensor(3), 'text')
    """
    return fresh(example, lambda t: t.double() if t.dtype.is_floating_point else t.clone())


def _size(tensor: Tensor) -> float:
    """The largest finite number."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())
    if largest < float("inf"):
        return largest
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
