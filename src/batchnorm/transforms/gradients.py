"""The other half of a certificate, for verbs after which training goes on: the same gradients and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from batchnorm.calling import call_with
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Certificate
from batchnorm.transforms.verify import dtypes_inside

Forward = Callable[[nn.Module, Any], Any]
# Of a tensor's largest number: what rounding may do to a gradient on its way through a deep network.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
KINKS = 4.0  # times the movement by rounding: three draws do not find the largest
_SMALL = 1e-2  # a tensor smaller than this share of the largest of its kind counts as if it were that large


@dataclass(frozen=True)
class Step:
    """What one step gave: by kind (outputs, gradients, buffers) and name; None where there is no gradient."""

    kinds: dict[str, dict[str, Tensor | None]]


Finish = Callable[[nn.Module], None]


def step(model: nn.Module, example: Any, run: Forward = call_with, finish: Finish | None = None) -> Step:
    """Run forward and backward once, in the model's mode, and leave the model and the random states as they were.

    >>> found = step(nn.Linear(2, 1, bias=False), torch.ones(3, 2))
    >>> {kind: list(named) for kind, named in found.kinds.items()}
    {'outputs': ['output 0'], 'gradients': ['weight', 'input 0'], 'buffers': []}

    The loss is a fixed random combination of all outputs, so that no gradient cancels by symmetry. ``finish`` may
    change the model after the backward pass, before its buffers are read.
    """
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dtype.is_floating_point:
            return value.clone()
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1].clone()  # a model may write into what it is given

    with untouched(model), torch.enable_grad():
        outputs = [t for t in tree_leaves(run(model, tree_map(leaf, example))) if isinstance(t, Tensor)]
        outputs = [t for t in outputs if t.dtype.is_floating_point]
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
            found = _gradients(total, list(sources.values()))
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
        largest = max((_size(t) for t in named.values() if t is not None), default=0.0)
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
            scale = max(_size(a), _SMALL * largest, 0.0 if floor is None else _size(floor))
            found[f"{kind} of {name}"] = (gap, (gap / scale if scale else float("inf")) if gap else 0.0, a.dtype)
    return found


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; where both are NaN, or the same infinity, there is none."""
    if torch.equal(a, b):
        return 0.0
    x, y = a.double(), b.double()
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
) -> Certificate:
    """Compare a step of two models, in the mode they are in, in training and in evaluation; raise if they differ.

    >>> layer = nn.BatchNorm1d(3)
    >>> print(verify_gradients(layer, layer, torch.randn(8, 3), verb="nothing"))
    gradients differ by at most 0 (0 of the largest) on 1 input; allowed: 0.0001 of the largest

    Compared are the gradients of all parameters and of the inputs, the outputs, and the buffers after the step, with a
    few samples of the example: they tell two functions apart as well as all of them. A tensor's difference counts
    relative to its largest number. Rounding alone can do more than that allows: a value that is zero but for rounding
    falls on the other side of a ReLU's kink, and a share of the gradient with it. So where the difference is above the
    tolerance, the old model is asked how far its own step moves when its parameters are changed by a unit in the last
    place; the new one may be `KINKS` times as far away. And in float64, where this does not happen, the two must give
    the same to 1e-9: then the certificate is that of float64. A gradient that is zero but for rounding, as that of a
    bias before BN, moves by more than itself, and is judged by float64 alone.
    """
    run = forward or call_with
    example = _cut(before, example, run)
    worst, share, allowed = 0.0, 0.0, tolerance or 0.0
    exact = (-1.0, -1.0)  # not asked
    own = {m.training for m in before.modules()}
    ways: list[bool | None] = [True, False] if len(own) == 1 else [None, True, False]
    with untouched(before), untouched(after):
        for mode in ways:
            if mode is not None:
                before.train(mode)
                after.train(mode)
            old, new = step(before, example, run, finish), step(after, example, run, finish)
            where = "the mode it is in" if mode is None else "training" if mode else "evaluation"
            _check_numbers(old, f"in {where}", verb)
            moved: tuple[dict[str, float], dict[str, float]] | None = None
            for name, (absolute, relative, dtype) in apart(old, new).items():
                limit = TOLERANCE.get(dtype, 0.0) if tolerance is None else tolerance
                kind = name.split()[0]
                if not relative <= limit and tolerance is None:
                    if moved is None:
                        exact = max(exact, _in_float64(before, after, example, run, verb, old, finish))
                        moved = _rounding(before, example, run, old, finish)
                    kinds, tensors = moved
                    limit = max(limit, KINKS * kinds.get(kind, 0.0))
                    if exact[0] >= 0:  # only then: a tensor that is nothing but rounding tells nothing here
                        limit = max(limit, KINKS * tensors.get(name, 0.0))
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
    if exact[0] >= 0:
        what = f"gradients in float64 (in the model's own numbers: {share:.2g}, as rounding alone moves them)"
        return Certificate(*exact, TOLERANCE[torch.float64], 1, what)
    return Certificate(worst, share, allowed, 1, "gradients")


def _check_numbers(old: Step, when: str, verb: str) -> None:
    """Refuse to compare with NaN, which nothing is equal to."""
    for kind in ("outputs", "gradients"):
        for name, tensor in old.kinds[kind].items():
            if tensor is not None and bool(tensor.isnan().any()):
                raise BatchNormError(
                    f"{when}, {kind} of {name} are NaN before anything is changed", where=verb,
                    do="give an example on which the model trains, or look for bad weights",
                )  # fmt: skip


def _cut(model: nn.Module, example: Any, run: Forward) -> Any:
    """A few samples of the example, if the model can take so few in training mode."""
    small = few_samples(example)
    if small is not example:
        try:
            with untouched(model), torch.no_grad():
                run(in_mode(model, True), tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, small))
        except Exception:
            return example
    return small


def _in_float64(
    before: nn.Module, after: nn.Module, example: Any, run: Forward, verb: str, old: Step, finish: Finish | None
) -> tuple[float, float]:
    """The largest differences of a step with a few samples in float64; negative where that cannot be asked.

    A gradient that is zero has no size to compare with here. What rounding made of it in the model's own numbers has:
    terms of that size, and more, were added up.
    """
    try:
        was, now = (step(copy.deepcopy(m).double(), double(example), run, finish) for m in (before, after))
    except Exception:  # an operation without float64
        return -1.0, -1.0
    worst, share = 0.0, 0.0
    for name, (absolute, relative, dtype) in apart(was, now, old).items():
        if not relative <= TOLERANCE.get(dtype, 0.0):
            raise NotEquivalent(
                f"in float64, {name} would differ by {absolute:.3g} ({relative:.2g} of the largest)",
                where=verb,
                do="the model was left as it was",
            )
        worst, share = max(worst, absolute), max(share, relative)
    return worst, share


def _rounding(
    before: nn.Module, example: Any, run: Forward, old: Step, finish: Finish | None, draws: int = 3
) -> tuple[dict[str, float], dict[str, float]]:
    """How far a step moves, by kind and by tensor, if every parameter changes by a unit in the last place."""
    moved: dict[str, float] = {}
    by_tensor: dict[str, float] = {}
    coarse = [torch.finfo(d).eps for d in dtypes_inside(before, example, run) if d in TOLERANCE]
    for seed in range(draws):
        draw = torch.Generator().manual_seed(seed)
        twin = copy.deepcopy(before)
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.dtype.is_floating_point:
                    noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32).to(parameter.device)
                    unit = max([torch.finfo(parameter.dtype).eps, *coarse])
                    parameter.copy_(parameter.double() * (1 + unit * noise.double()))
        for name, (_, relative, _) in apart(old, step(twin, example, run, finish)).items():
            kind = name.split()[0]
            moved[kind] = max(moved.get(kind, 0.0), relative if relative < 1 else 0.0)
            by_tensor[name] = max(by_tensor.get(name, 0.0), relative)
    return moved, by_tensor


def few_samples(given: Any, samples: int = 4) -> Any:
    """Return the first samples of a batch: enough to tell two functions apart.

    >>> few_samples((torch.zeros(32, 3), torch.zeros(7)))[0].shape
    torch.Size([4, 3])
    """
    sizes = {t.shape[0] for t in tree_leaves(given) if isinstance(t, Tensor) and t.dim() > 1}
    if len(sizes) != 1 or max(sizes) <= samples:
        return given
    return tree_map(lambda t: t[:samples] if isinstance(t, Tensor) and t.dim() > 1 else t, given)


def double(example: Any) -> Any:
    """Return an example with its floating-point tensors in float64.

    >>> double((torch.zeros(1), torch.tensor(3), "text"))
    (tensor([0.], dtype=torch.float64), tensor(3), 'text')
    """
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.dtype.is_floating_point else t, example)


def _size(tensor: Tensor) -> float:
    """The largest finite number."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())
    if largest < float("inf"):
        return largest
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
