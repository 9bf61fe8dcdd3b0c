"""One cell from start to end: build the contenders, check that they agree, let them take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from batchnorm.bench.cases import Case
from batchnorm.bench.contenders import CONTENDERS, Step
from batchnorm.bench.inputs import Inputs, make_inputs
from batchnorm.bench.measure import alternate
from batchnorm.errors import first_line
from batchnorm.records import Measurement

QUANTITIES = (
    "the output",
    "the gradient of x",
    "the gradient of weight",
    "the gradient of bias",
    "that of the residual",
)
# Relative to the norm of torch's result. Wide, because torch's own channels_last sums lose digits (0.1% of dx
# at 32x64x56x56, measured against float64), and because a value within rounding of zero passes a ReLU or not
# by chance (in bfloat16 one in some hundred is that close). It tells a wrong kernel, not a last digit.
TOLERANCE = {"float32": 1e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class CellResult:
    """What a cell gave: its measurements, and a sentence for each contender that was left out.

    >>> CellResult((), ()).notes
    ()
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]


def run_cell(
    case: Case, names: Iterable[str], rounds: int, *, seed: int = 0, measure: Callable[..., Any] = alternate
) -> CellResult:
    """Measure the named contenders on one case.

    >>> run_cell(Case((4, 3), "contiguous", "bn", "eval"), ["torch", "floor"], rounds=1).measurements[0].unit
    's'

    A contender that fails to build, or whose numbers differ from torch's, is left out and named in the notes:
    a wrong answer has no speed.
    """
    with torch.set_grad_enabled(case.pass_name != "eval"):
        steps, notes = _build_steps(case, names, make_inputs(case, seed))
        samples = measure(steps, rounds, seed=seed)
    return CellResult(
        tuple(
            Measurement(
                "time",
                {**case.setting(), "contender": name},
                tuple(CONTENDERS[name].scale(case) * seconds for seconds in times),
                "s",
            )
            for name, times in samples.items()
        ),
        tuple(notes),
    )


def _build_steps(case: Case, names: Iterable[str], inputs: Inputs) -> tuple[dict[str, Step], list[str]]:
    """The steps that computed the same as torch, and a sentence for each contender that did not."""
    steps: dict[str, Step] = {}
    notes = []
    expected: tuple[torch.Tensor, ...] = ()
    for name in names:
        contender = CONTENDERS[name]
        if not contender.serves(case):
            continue
        try:
            step = contender.build(case, inputs)
            result = contender.tensors(case, step())
        except Exception as error:
            notes.append(f"{name} failed on {case.label}: {type(error).__name__}: {first_line(error)}")
            continue
        if name == "torch":
            expected = result
        problem = disagreement(result, expected, TOLERANCE[case.dtype]) if contender.computes else ""
        if problem:
            notes.append(f"{name} disagrees with torch on {case.label}: {problem}")
        else:
            steps[name] = step
    return steps, notes


def disagreement(result: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float) -> str:
    """What differs by more than the tolerance, in words, or nothing.

    >>> disagreement((torch.ones(2),), (torch.zeros(2),), 1e-3)
    'the output is off by 1.41 times its norm'

    The difference is measured in the norm of the whole tensor: two correct implementations may still let a
    value within rounding of zero through the ReLU or not.
    """
    if expected and len(result) != len(expected):
        return f"it returned {len(result)} tensors and not {len(expected)}"
    for quantity, value, right in zip(QUANTITIES, result, expected, strict=False):
        value, right = value.detach().double(), right.detach().double()
        if value.shape != right.shape:
            return f"{quantity} has shape {tuple(value.shape)} and not {tuple(right.shape)}"
        norm = float(right.norm())
        off = float((value - right).norm()) / (norm if norm > 0 else 1.0)
        if not off <= tolerance:
            return f"{quantity} is off by {off:.3g} times its norm"
    return ""
