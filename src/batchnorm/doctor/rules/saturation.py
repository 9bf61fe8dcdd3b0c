"""Saturated nonlinearities: sigmoids in their flat ends, signals that are lost, ReLUs that are dead.

## What it does
Inspects, in training mode, the output of sigmoid, tanh and ReLU (modules; in a check functions, too) where a linear or
convolutional layer reads it: which share of the values lies within 1 % of an end of the range, whether the values
differ between examples at all (8 or more), and which share of the ReLU's units is zero for every example (32 or more:
units that rarely fire are not dead). Gates that are multiplied with something and final outputs are left out: they may
well saturate.

## Why is this bad?
In the flat ends the slope is nearly zero, and with it the gradient of everything below; layers further up then see
inputs that hardly depend on the example. A unit of a ReLU that is zero for all examples has no gradient either, and
never comes back. This is the problem that batch normalisation was made for: normalised inputs stay where the slope is.

## Example
```python
nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(100, 100), nn.Sigmoid())), nn.Linear(100, 10))
```

## Use instead
```python
model, report = bn.insert(model, example)  # BN before each nonlinearity; train it from there
```

## Fix safety
Unsafe: `batchnorm.insert` puts BN behind every layer that a nonlinearity follows, which makes it another network.

## References
- Ioffe & Szegedy (2015), section 2
- Glorot & Bengio (2010), section 3
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.doctor.activations import (
    CARRIERS,
    KINDS,
    READERS,
    ActivationOutput,
    Following,
    Listening,
    measure,
    worst,
)
from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import TrainingRun, Watcher
from batchnorm.nested import tensors_in
from batchnorm.preserve import in_mode
from batchnorm.records import Finding, Report
from batchnorm.transforms.insert import insert

SATURATED = 0.75  # of the values
DEAD = 0.9  # of the units
LOST = 1e-3  # the standard deviation between examples, of values between 0 and 1
EXAMPLES = 8  # fewer say nothing about differences
MANY = 32  # fewer examples cannot tell a dead unit from one that rarely fires
BATCHES = 4

REPAIR = "bn.insert(model, example) puts batch normalisation before each nonlinearity; or a better initialisation"


def look(subject: Subject) -> Iterator[Finding]:
    """Run some batches, or the example, through a copy in training mode."""
    given = subject.batches[:BATCHES] or [subject.example]
    run = subject.run_batch if subject.batches else subject.run
    found: list[ActivationOutput] = []
    for training in (True, False):
        model = in_mode(copy.deepcopy(subject.net), training)
        found.clear()
        try:
            with torch.no_grad(), Listening(model, found.append):
                for one in given:
                    run(model, one)
            break
        except ValueError:  # one value per channel in training
            continue
    differing = all(_differ(one) for one in given)
    for signal in worst(found):
        yield from _judge(signal, differing, None)


class _Watcher(Watcher):
    modules = (*KINDS, *READERS, *CARRIERS)

    def __init__(self) -> None:
        self.following = Following()
        self.now = self.differing = False

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.following.clear()
        self.now = run.looking and run.gradients
        if self.now:
            self.differing = _differ((arguments, keywords))
        yield from ()

    def on_module(
        self, run: TrainingRun, path: str, module: nn.Module, arguments: tuple[Any, ...], output: Any
    ) -> Iterator[Finding]:
        if not self.now or not isinstance(output, Tensor) or not module.training:
            return
        kind = next((name for cls, name in KINDS.items() if isinstance(module, cls)), None)
        if kind is not None:
            self.following.made(output, measure(path, kind, output))
            return
        signal = self.following.of(arguments[0]) if arguments else None
        if signal is not None and isinstance(module, READERS):
            yield from _judge(signal, self.differing, run.step)
        elif signal is not None:
            self.following.made(output, signal)

    def on_return(self, run: TrainingRun, output: Any) -> Iterator[Finding]:
        self.following.clear()
        self.now = False
        yield from ()


def _differ(given: Any) -> bool:
    """Whether the examples of a batch differ; if not, nothing can be said of what comes out."""
    tensors = [t for t in tensors_in(given) if t.dim() > 0 and len(t) > 1]
    return any(bool((t[:1] != t[1:]).any()) for t in tensors)


def _judge(signal: ActivationOutput, differing: bool, step: int | None) -> Iterator[Finding]:
    enough = differing and signal.examples >= EXAMPLES
    if signal.flat > SATURATED:
        sentence = (
            f"{signal.flat:.0%} of its values lie in the flat ends of the {signal.kind}: hardly a gradient passes"
        )
    elif enough and signal.varies < LOST:
        sentence = (
            f"its values hardly differ between examples (standard deviation {signal.varies:.1e}): no signal is left"
        )
    elif differing and signal.examples >= MANY and signal.dead > DEAD:
        sentence = (
            f"{signal.dead:.0%} of its {signal.units} units are zero for all {signal.examples} examples: no gradient "
            "reaches them"
        )
    else:
        return
    yield RULE.found(
        signal.path,
        sentence,
        REPAIR,
        step=step,
        nonlinearity=signal.kind,
        flat=signal.flat,
        dead=signal.dead,
        between_examples=signal.varies,
        examples=signal.examples,
    )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Insert BN before every nonlinearity."""
    example = repair.need("example", RULE.code)
    repair.model, report = insert(repair.model, example, forward=repair.forward, optimizer=repair.optimizers)
    return report


RULE = Rule(
    "BN307", "saturation", "warning", __doc__, look, ("model", "example"), watch=_Watcher, fix=fix, safety="unsafe",
    keeps=False,
)  # fmt: skip
