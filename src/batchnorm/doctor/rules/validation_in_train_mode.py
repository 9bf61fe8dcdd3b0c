"""Validation in training mode: running statistics learn from data that nobody trains on.

## What it does
Notices that running statistics move in a call of the model without gradients, in a run that also trains.

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

from collections.abc import Iterator

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import Pass, Run, Watcher
from batchnorm.records import Finding


class _Watcher(Watcher):
    """Waits until it is clear that this run trains: without training, a pass over data may be a calibration."""

    def __init__(self) -> None:
        self.trained = False

    def on_pass(self, run: Run, seen: Pass) -> Iterator[Finding]:
        if seen.gradients:
            self.trained = self.trained or seen.updates
        elif seen.updates and not seen.recomputed and (self.trained or run.step):
            yield RULE.found(
                seen.path,
                "its running statistics moved in a call without gradients, as in a validation that forgot model.eval()",
                "call model.eval() first, and model.train() after; or `with bn.no_update(model):` if it is meant",
                step=run.step,
                call=run.call,
                values=seen.values,
            )


RULE = Rule("BN301", "validation-in-train-mode", "error", __doc__, needs=("run",), watch=_Watcher)
