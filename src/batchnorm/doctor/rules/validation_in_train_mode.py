"""Validation in training mode: running statistics learn from data that is not trained on.

## What it does
Notices that running statistics move in a call of the model without gradients, in a run that also trains. Calls that are
part of every step (a generator that makes images for the discriminator, guessed labels) are not validation, and a pass
that begins with reset statistics is a measurement of them: neither is reported here. Nor are the calls with which
``torch.jit.trace`` tries what it has traced: that the model was traced in training mode, BN501 says.

It also notices validation that forgot ``torch.no_grad()`` as well: at least three calls in a row, with no step of any
optimiser between them, whose results no backward pass ever reaches, in a run in which other calls are trained on. A
batch or two that the loop leaves out (a loss that is not finite) is not reported, so a validation of one or two batches
with gradients on is not seen.

## Why is this bad?
``model.eval()`` was forgotten. The validation loss is that of batch statistics (each example sees the others, and the
figure depends on the batch size), dropout is on, and the running statistics learn from the validation data: the
test set leaks into the model.

## Example
```python
with torch.no_grad():
    loss = criterion(model(x_val), y_val)
```

## Use instead
```python
model.eval()
with torch.no_grad():
    loss = criterion(model(x_val), y_val)
model.train()
```

## Fix safety
No automatic fix: the loop has to say ``eval()``. Where training mode is meant (a GAN's generator, a teacher), say so
with ``with bn.no_update(model):``, which keeps the statistics.

## References
- bearpaw/pytorch-pose (stacked hourglass)#44
- icon-lab/SynDiff#46
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.records import Finding

NEVER = -2
IN_A_ROW = 3  # calls without a backward pass: fewer may be batches that the loop skipped
REPAIR = "call model.eval() first, and model.train() after; or `with bn.no_update(model):` if it is meant"


@dataclass
class _Call:
    """A call of the model for gradients: whether a backward pass could reach its layers, and whether one did."""

    step: int
    number: int
    hooked: bool = False
    used: bool = False

    def reached(self, *_: Any) -> None:
        """Record that a backward pass reached the call."""
        self.used = True


@dataclass
class _Bare:
    """Calls without gradients that belong to the training, such as those that guess labels: how many a turn has."""

    turn: int = NEVER
    calls: int = 0  # of this turn
    turns: int = 0  # earlier ones that had some
    most: int = 0  # of any earlier turn

    def one_more(self, turn: int) -> bool:
        """Count a call; return whether this turn has far more of them than every turn before."""
        if turn != self.turn:
            self.turns, self.most = self.turns + (self.calls > 0), max(self.most, self.calls)
            self.turn, self.calls = turn, 0
        self.calls += 1
        return self.turns >= IN_A_ROW and self.calls > 2 * self.most + IN_A_ROW


@dataclass
class _LayerModes:
    turn: int = 0
    calls: list[_Call] = field(default_factory=list)  # of this turn
    unused: int = NEVER  # the last turn that had calls in vain


class _Watcher(Watcher):
    """Waits until it is clear that this run trains: without training, a pass over data may be a calibration."""

    def __init__(self) -> None:
        self.trained: Counter[str] = Counter()  # updates with gradients, by layer
        self.bare: dict[str, tuple[int, int]] = {}  # the last two turns with updates without any
        self.guesses: dict[str, _Bare] = {}
        self.now: _Call | None = None
        self.layers: dict[str, _LayerModes] = {}
        self.exported = NEVER  # the last step in which the model was traced or exported in training mode

    def on_export(self, run: TrainingRun, path: str, layer: _BatchNorm) -> Iterator[Finding]:
        if uses(layer)[1]:
            self.exported = run.step
        yield from ()

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.now = _Call(run.step, run.call) if run.gradients else None
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if not seen.updates or seen.recomputed or self.exported == run.step:
            return
        path = seen.path
        if seen.gradients:
            yield from self._follow(run, seen)
            self.trained[path] += 1
            return
        before, last = self.bare.get(path, (NEVER, NEVER))
        before = last if last < seen.turn else before
        self.bare[path] = before, seen.turn
        count = seen.layer.num_batches_tracked
        if count is not None and int(count) < self.trained[path]:
            self.trained[path] = 0  # the statistics were reset and are being recomputed
        more = self.guesses.setdefault(path, _Bare()).one_more(seen.turn)
        # What happens in the first step, or in one after the other, is part of the training, unless it is far more.
        if self.trained[path] and seen.turn and (before < seen.turn - 1 or more):
            yield RULE.found(
                path,
                "its running statistics moved in a call without gradients, as in a validation that forgot model.eval()",
                REPAIR,
                step=run.step,
                call=run.call,
                values=seen.values,
                updates_with_gradients=self.trained[path],
            )

    def _follow(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        """Hook into the graph of this call to notice its backward pass."""
        call = self.now
        if call is None or call.number != seen.call or run.stepping is not None:
            return
        layer = self.layers.setdefault(seen.path, _LayerModes(seen.turn))
        if layer.turn != seen.turn:
            yield from self._close(run, seen.path, layer)
            layer.turn, layer.calls = seen.turn, []
        if seen.y.grad_fn is not None:
            # On the node, not on the tensor: it goes with the graph, and the tensor stays as it was.
            seen.y.grad_fn.register_prehook(call.reached)
            call.hooked = True
        if not layer.calls or layer.calls[-1] is not call:
            layer.calls.append(call)

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        for path, layer in self.layers.items():
            yield from self._close(run, path, layer)

    def _close(self, run: TrainingRun, path: str, layer: _LayerModes) -> Iterator[Finding]:
        """Look at the calls of a turn, which an optimiser's step has ended: what was not used by now never will be."""
        row: list[_Call] = []
        longest: list[_Call] = []
        for call in layer.calls:
            in_vain = call.hooked and not call.used
            row = [*(row if row and row[-1].step == call.step else []), call] if in_vain else []
            longest = max(longest, row, key=len)
        before, layer.unused = layer.unused, layer.turn if longest else layer.unused
        if len(longest) < IN_A_ROW or not layer.turn or before >= layer.turn - 1:
            return
        of_run = run.layers[path]
        counted, mean = of_run.num_batches_tracked, of_run.running_mean
        reset = counted is not None and int(counted) < self.trained[path]
        if reset or mean is None or not bool(mean.isfinite().all()):  # being recomputed; or reported by BN203
            return
        yield RULE.found(
            path,
            f"its running statistics moved in {len(longest)} calls in a row without a backward pass, as in a "
            "validation that forgot model.eval() and torch.no_grad()",
            REPAIR,
            step=longest[0].step,
            call=longest[0].number,
            calls=len(longest),
        )


RULE = Rule("BN301", "validation-in-train-mode", "error", __doc__, needs=("run",), watch=_Watcher)
