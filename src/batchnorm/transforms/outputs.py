"""Run models and compare their outputs: differences, random inputs, and the effect of rounding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import parameters, untouched
from batchnorm.transforms.choices import Within
from batchnorm.transforms.stages import stage

Forward = Callable[[nn.Module, Any], Any]
# Of the largest output: what rounding may do to a deep network.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
KINKS = 4.0  # times the movement by rounding: three draws do not find the largest
ROUNDED = 5e-2  # beyond this share of the largest output, nothing is put down to rounding


def outputs_of(model: nn.Module, given: Any, run: Forward, within: Within | None = None) -> list[Tensor]:
    """Return the tensors of one run, which leaves no trace in the model and the random states.

    >>> outputs_of(nn.ReLU(), torch.tensor([-1.0, 2.0]), call_with)
    [tensor([0., 2.])]
    """
    with torch.inference_mode(False), torch.no_grad(), untouched(model):
        example = fresh(given)
        with within or nullcontext():
            made = run(model, example)
        return [t.detach().clone() for t in tensors_in(made)]


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


def kinds_of(tensors: list[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes.

    >>> kinds_of([torch.zeros(2, 3)])
    [((2, 3), torch.float32)]
    """
    return [(tuple(t.shape), t.dtype) for t in tensors]


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


def dtypes_inside(model: nn.Module, given: Any, run: Forward = call_with) -> set[torch.dtype]:
    """Return in which numbers modules compute on the way: under autocast, no parameter shows them.

    >>> dtypes_inside(nn.Sequential(nn.Linear(3, 2).double()), torch.ones(1, 3, dtype=torch.float64))
    {torch.float64}
    """
    found: set[torch.dtype] = set()
    with untouched(model):  # which removes the hooks, too
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_hook(lambda module, args, made: found.update(t.dtype for t in tensors_in(made)))
        outputs_of(model, given, run)
    return found


def by_rounding(model: nn.Module, given: Any, run: Forward, old: list[Tensor], needed: float) -> float:
    """Return how far outputs move, as a share, when parameters do by a unit in the last place; it stops at ``needed``.

    >>> layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    >>> 0 <= by_rounding(layer, x, call_with, [layer(x).detach()], 1.0) < 1e-5
    True
    """
    stage("measuring what rounding does to outputs")
    moved = 0.0
    for seed in range(3):
        if moved >= needed:
            break
        with parameters(model):
            nudge(model, given, run, seed)
            new = outputs_of(model, given, run)
        moved = max(moved, difference(old, new)[1] if kinds_of(old) == kinds_of(new) else 0.0)
    return moved


def nudge(model: nn.Module, given: Any, run: Forward, seed: int) -> None:
    """Change all parameters by a unit in the last place of what the model computes with.

    >>> layer = nn.Linear(2, 2)
    >>> before = layer.weight.detach().clone()
    >>> nudge(layer, torch.ones(1, 2), call_with, 0)
    >>> torch.allclose(before, layer.weight, rtol=1e-6), torch.equal(before, layer.weight)
    (True, False)
    """
    coarse = [torch.finfo(d).eps for d in dtypes_inside(model, given, run) if d in TOLERANCE]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.is_floating_point:
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32).to(parameter.device)
                unit = max([torch.finfo(parameter.dtype).eps, *coarse])
                parameter.copy_(parameter.double() * (1 + unit * noise.double()))
