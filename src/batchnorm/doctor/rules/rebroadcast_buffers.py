"""Running statistics that are written to between a forward and its backward pass: the backward pass raises.

## What it does
Finds torch's BN layers under a DistributedDataParallel that broadcasts buffers in place before every forward pass
(torch's did so until version 2.12). While training runs, it sees that a layer's running statistics were written to from
outside between a forward pass whose backward pass is still to come and the next forward pass.

## Why is this bad?
Torch's BN keeps its running statistics for the backward pass, though it does not need them there. Two forward passes
before one backward pass (real and fake images, two views of an image, a shared encoder) end in ``one of the variables
needed for gradient computation has been modified by an inplace operation``, on several processes only.

## Example
```python
model = DistributedDataParallel(model)
loss = criterion(model(real), model(fake))
loss.backward()
```

## Use instead
```python
model = DistributedDataParallel(model, broadcast_buffers=False)
real_out, fake_out = model(torch.cat((real, fake))).chunk(2)  # or one forward pass
bn.BatchNorm2d(64)  # or our layers, which do not keep them
```

## Fix safety
No automatic fix: the wrapper, the loop or the layers have to change before the wrapper is made.

## References
- pytorch/pytorch#22095
- pytorch/pytorch#175024
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.recompute import in_backward
from batchnorm.records import Finding

REPAIR = "broadcast_buffers=False, one forward pass of both batches, or bn.BatchNorm1d/2d/3d"


def look(subject: Subject) -> Iterator[Finding]:
    """Find wrappers that write into buffers before every forward pass, around layers that this breaks."""
    for path, module in subject.net.named_modules():
        if not isinstance(module, DistributedDataParallel) or not module.broadcast_buffers or not _in_place(module):
            continue
        layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and _breaks_on_writes(m)]
        if layers:
            yield RULE.found(
                path,
                f"it writes into the running statistics of {len(layers)} of torch's BN layers before every forward "
                "pass: two forward passes before a backward pass would raise",
                REPAIR,
                severity="advice",
                layers=len(layers),
            )


def _in_place(wrapper: DistributedDataParallel) -> bool:
    """Whether a wrapper's broadcast shows in the version counters that autograd goes by."""
    try:
        return "preserve_version" not in inspect.getsource(type(wrapper)._sync_buffers)
    except (OSError, TypeError, AttributeError):
        return False


def _breaks_on_writes(layer: _BatchNorm) -> bool:
    return not isinstance(layer, _BatchNormBase) and layer.running_mean is not None


class _Mark:
    """Lives as long as the graph of a forward pass, and knows whether its backward pass has run."""

    def __init__(self, version: int) -> None:
        self.version, self.done = version, False

    def __call__(self, gradient: Tensor) -> None:
        self.done = True


class _Watcher(Watcher):
    def __init__(self) -> None:
        self.waiting: dict[str, list[weakref.ref[_Mark]]] = {}

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if _breaks_on_writes(seen.layer) and seen.gradients and seen.y.requires_grad and not seen.recomputed:
            assert seen.layer.running_mean is not None
            mark = _Mark(seen.layer.running_mean._version)
            seen.y.register_hook(mark)  # type: ignore[no-untyped-call]
            self.waiting.setdefault(seen.path, []).append(weakref.ref(mark))
        return iter(())

    def on_input(
        self, run: TrainingRun, path: str, layer: _BatchNorm, x: Tensor, mask: Tensor | None
    ) -> Iterator[Finding]:  # fmt: skip
        if in_backward():  # a recomputation, which may work with copies of the buffers
            return
        marks = [ref for ref in self.waiting.pop(path, ()) if (mark := ref()) is not None and not mark.done]
        if not marks or layer.running_mean is None:
            return
        self.waiting[path] = marks
        first = marks[0]()
        assert first is not None
        now = layer.running_mean._version
        if now != first.version:
            yield RULE.found(
                path,
                f"its running statistics were written to before call {run.call} of the model, {len(marks)} forward "
                f"pass{'es' * (len(marks) > 1)} of it waiting for a backward pass, which will raise",
                REPAIR,
                step=run.step,
                call=run.call,
                version=now,
                version_expected=first.version,
            )


RULE = Rule("BN403", "rebroadcast-buffers", "error", __doc__, look, ("model",), watch=_Watcher)
