"""Validation in training mode: running statistics learn from data that nobody trains on.

## What it does
Notices that running statistics move in a call of the model without gradients, in a run that also trains. Calls that are
part of every step (a generator that makes images for the discriminator, guessed labels) are not validation, and a pass
that begins with reset statistics is a measurement of them: neither is reported here.

## Why is this bad?
Somebody forgot ``model.eval()``. The validation loss is that of batch statistics (each example sees the others, and the
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
None by machine: the loop has to say ``eval()``. Where training mode is meant (a GAN's generator, a teacher), say so
with ``with bn.no_update(model):``, which keeps the statistics.

## References
- bearpaw/pytorch-pose (stacked hourglass)#44
- icon-lab/SynDiff#46
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import Run
from batchnorm.doctor.watcher import Pass, Watcher
from batchnorm.records import Finding

NEVER = -2


class _Watcher(Watcher):
    """Waits until it is clear that this run trains: without training, a pass over data may be a calibration."""

    def __init__(self) -> None:
        self.trained: Counter[str] = Counter()  # updates with gradients, by layer
        self.bare: dict[str, tuple[int, int]] = {}  # the last two turns with updates without any

    def on_pass(self, run: Run, seen: Pass) -> Iterator[Finding]:
        if not seen.updates or seen.recomputed:
            return
        path = seen.path
        if seen.gradients:
            self.trained[path] += 1
            return
        before, last = self.bare.get(path, (NEVER, NEVER))
        before = last if last < seen.turn else before
        self.bare[path] = before, seen.turn
        count = seen.layer.num_batches_tracked
        if count is not None and int(count) < self.trained[path]:
            self.trained[path] = 0  # somebody has reset the statistics, and measures them anew
        # What happens in the first step, or in one after the other, is part of the training.
        if self.trained[path] and seen.turn and before < seen.turn - 1:
            yield RULE.found(
                path,
                "its running statistics moved in a call without gradients, as in a validation that forgot model.eval()",
                "call model.eval() first, and model.train() after; or `with bn.no_update(model):` if it is meant",
                step=run.step,
                call=run.call,
                values=seen.values,
                updates_with_gradients=self.trained[path],
            )


RULE = Rule("BN301", "validation-in-train-mode", "error", __doc__, needs=("run",), watch=_Watcher)
