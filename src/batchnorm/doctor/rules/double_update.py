"""Statistics that are updated twice a step, because activation checkpointing runs the layer twice.

## What it does
Counts how often a layer was called in training, and compares ``num_batches_tracked``: a layer that a backward pass
recomputes grows by two for every call.

## Why is this bad?
`torch.utils.checkpoint` throws activations away and computes them again in the backward pass, so BN sees every batch
twice. The running average forgets faster than the momentum says (0.1 becomes 0.19), a cumulative one (momentum None)
has counted twice, and a run with checkpointing does not reproduce one without. Outputs and gradients are right, so that
comparing losses does not show it.

## Example
```python
y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # with BN layers in the block
```

## Use instead
```python
model = bn.update_once(model)  # the recomputation leaves the statistics alone
```

## Fix safety
Safe: `batchnorm.update_once` puts two hooks on the layers; outputs, gradients and evaluation stay the same.

## References
- pytorch/pytorch#96136, pytorch/pytorch#62471
- facebookresearch/fairscale#1035
- gpleiss/efficient_densenet_pytorch#73
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.recompute import update_once
from batchnorm.records import Change, Finding, Report


class _Watcher(Watcher):
    """Counts; the counter of a layer is read only if the layer was recomputed."""

    def __init__(self) -> None:
        self.before: dict[str, int | None] = {}
        self.calls: dict[str, int] = {}
        self.again: dict[str, int] = {}  # recomputed, since the last step

    def on_begin(self, run: TrainingRun) -> Iterator[Finding]:
        for path, layer in run.layers.items():
            count = layer.num_batches_tracked
            self.before[path] = None if count is None or count.is_meta else int(count)
            self.calls[path] = 0
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if seen.updates and seen.recomputed:
            self.again[seen.path] = self.again.get(seen.path, 0) + 1
        elif seen.updates:
            self.calls[seen.path] += 1
        yield from ()

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        again, self.again = self.again, {}
        for path in again:
            layer, calls = run.layers[path], self.calls[path]
            count, before = layer.num_batches_tracked, self.before[path]
            # A layer that updates in the recomputation only (as fairscale's do), or not in it, has one for each call.
            grown = calls + again[path] if count is None or before is None else int(count) - before
            if not 0 < calls < grown:
                continue
            times = grown / calls
            effective = "" if layer.momentum is None else _memory(layer.momentum, times)
            yield RULE.found(
                path,
                f"its statistics were updated {grown} times in {calls} call{'s' * (calls > 1)}: the backward pass "
                f"recomputes it (activation checkpointing){effective}",
                "bn.update_once(model)",
                step=run.step,
                calls=calls,
                updates=grown,
                momentum=-1.0 if layer.momentum is None else layer.momentum,
            )

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        yield from self.on_step(run)


def _memory(momentum: float, times: float) -> str:
    return f", so that its momentum of {momentum:.3g} works as {1 - (1 - momentum) ** times:.2g}"


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Leave the statistics alone in a recomputation."""
    update_once(repair.model)
    return Report(tuple(Change(finding.path, "updates per call", 2, 1) for finding in findings), {})


RULE = Rule("BN302", "double-update", "warning", __doc__, needs=("run",), watch=_Watcher, fix=fix, safety="safe")
