"""Running statistics that were never updated: evaluation does not normalise at all.

## What it does
Finds BN layers whose running mean is exactly 0 and whose variance is exactly 1, as in a new layer, although the model
is used: it is in evaluation mode, or something shows that it was trained (beta differs from channel to channel, batches
were counted, the optimiser has state, other BN layers have statistics and the example reaches this one). A new model in
training mode is as it should be, and so is a layer that is never called.

While training runs, it notices a new layer that is trained in evaluation mode from the first step on: the whole model
is in it, gamma or beta learns, step after step, and the running statistics are still 0 and 1. ``model.train()``
was not called. Layers with statistics (a pretrained network that is fine-tuned with them), layers whose beta has
values already (statistics may be folded into them), frozen ones (`batchnorm.freeze`), and those in evaluation mode
inside a model in training mode are taken as intended. Layers without gamma and beta are not reported.

## Why is this bad?
In evaluation such a layer is the identity, but for gamma and beta. Training had statistics of the batch, so the network
that is evaluated is another one. It happens when the state is not carried along (functional code that drops the new
buffers, a checkpoint of parameters only), with ``momentum=0.0``, and when training ran in evaluation mode. In that
last case the network that is evaluated is the one that was trained: one without normalisation, and without dropout.

## Example
```python
model.load_state_dict(dict(trained.named_parameters()), strict=False)  # the buffers stay behind
model.eval()
```

## Use instead
```python
model.load_state_dict(trained.state_dict())
model, calibrated = bn.calibrate(model, batches)  # if the statistics are lost
```

## Fix safety
Unsafe: `batchnorm.calibrate` measures the statistics of the data that is given, which must be that of training.

## References
- patrick-kidger/equinox#955
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject, measured, norm_of
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.optim import state_of
from batchnorm.records import Finding, Report
from batchnorm.transforms.freeze import is_frozen

STEPS = 3  # in which a layer learnt in evaluation mode


def look(subject: Subject) -> Iterator[Finding]:
    """Find buffers that are as new in a model that is not."""
    new = [norm for norm in subject.norms if norm.is_new]
    if not new:
        return
    others = any(norm.is_measured for norm in subject.norms)
    stepped = any(state for optimizer in subject.optimizers for state in state_of(optimizer).values())
    for norm in new:
        reached = _reached(subject, norm)
        if reached is False:
            continue
        why = _trained(norm)
        if not why and others:
            if not reached:  # no sign that it was trained or is called
                continue
            if norm.layer is not None and norm.layer.training and subject.optimizers and not stepped:
                continue  # a new head on a trained body, and an optimiser that is about to begin
            why = "other layers have statistics, and the example reaches this one"
        if not why and stepped:
            why = "the optimiser has stepped"
        evaluates = norm.layer is not None and not uses(norm.layer)[0]
        if not why and not evaluates:
            continue
        grave = bool(why) and (evaluates or norm.layer is None)
        reason = why or "it is in evaluation mode"
        also = " and it is in evaluation mode" if why and evaluates else ""
        yield RULE.found(
            norm.path,
            f"its running mean is still 0 and its variance 1 in every channel, although {reason}{also}",
            "load the buffers too, or bn.calibrate(model, batches of the training data)",
            severity="error" if grave else "warning",
            channels=_channels(norm),
            batches_tracked=-1 if norm.num_batches_tracked is None else int(norm.num_batches_tracked),
            evaluation_mode=evaluates,
        )


def _reached(subject: Subject, norm: Norm) -> bool | None:
    """Whether the example reaches a layer; None if there is no example to tell."""
    if subject.model is None or subject.example is None:
        return None
    assert norm.layer is not None
    return bool(subject.graph.of(norm.layer))


def _trained(norm: Norm) -> str:
    """What shows that a layer has been through training; gammas are often initialised at random, betas are not."""
    if norm.num_batches_tracked is not None and int(norm.num_batches_tracked) > 0:
        return f"it counted {int(norm.num_batches_tracked)} batches"
    if norm.bias is not None:
        return "its beta was trained" if _varies(norm.bias) else ""
    return "its gamma was trained" if norm.weight is not None and _varies(norm.weight) else ""


def _varies(values: Tensor) -> bool:
    return values.numel() > 1 and not values.is_meta and bool((values != values.flatten()[0]).any())


def _channels(norm: Norm) -> int:
    return 0 if norm.running_mean is None else norm.running_mean.shape[-1]


class _Watcher(Watcher):
    """Counts the steps in which a new layer learnt in evaluation mode, from the first one on."""

    def __init__(self) -> None:
        self.new: dict[str, int] = {}  # layers as new that never used a batch's statistics: steps in which they learnt
        self.ran: set[str] = set()  # since the last step
        self.learnt: set[str] = set()

    def on_begin(self, run: TrainingRun) -> Iterator[Finding]:
        for path, layer in run.layers.items():
            norm = norm_of(path, layer)
            if norm.is_new and not _trained(norm) and not is_frozen(layer) and uses(layer, training=True)[1]:
                self.new[path] = 0
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if seen.path in self.new and not seen.recomputed:
            if seen.from_batch or (seen.gradients and not _in_evaluation(run.model, seen.path)):
                del self.new[seen.path]
            elif seen.gradients:
                self.ran.add(seen.path)
        yield from ()

    def on_backward(self, run: TrainingRun, path: str) -> Iterator[Finding]:
        self.learnt.add(path)
        yield from ()

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        for path in sorted(self.ran & self.learnt & self.new.keys()):
            self.new[path] += 1
            if self.new[path] == STEPS and norm_of(path, run.layers[path]).is_new:
                if run.found("BN105", path):
                    continue  # which knows when it was put into evaluation mode
                yield RULE.found(
                    path,
                    f"it is trained in evaluation mode: gamma or beta learnt in {STEPS} steps, and its running mean is "
                    "still 0 and its variance 1 in every channel, so that it normalises nothing",
                    "call model.train() before training; bn.freeze(model, modules) if that is meant",
                    fix="none", step=run.step, call=run.call, steps=STEPS,
                )  # fmt: skip
        self.ran, self.learnt = set(), set()

    def too_short(self, run: TrainingRun) -> str:
        most = max(self.new.values(), default=0)
        return f"{most} of {STEPS} steps of new layers in evaluation mode" if 0 < most < STEPS else ""


def _in_evaluation(model: nn.Module, path: str) -> bool:
    """Whether a layer and all that it is in are in evaluation mode; a container that is never called is ignored.

    >>> model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)).eval())
    >>> _in_evaluation(model, "0.0"), _in_evaluation(model.eval(), "0.0")
    (False, True)
    """
    around, module = [model], model
    for name in path.split(".") if path else ():
        module = module.get_submodule(name)
        around.append(module)
    return not any(one.training for one in around if not isinstance(one, (nn.ModuleDict, nn.ModuleList)))


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Measure the statistics."""
    repair.model, done = measured(repair.model, repair.need("batches", RULE.code), repair.forward)
    return done.report


RULE = Rule(
    "BN202", "never-updated", "warning", __doc__, look, ("tensors",), watch=_Watcher, fix=fix, safety="unsafe",
    keeps=False,
)  # fmt: skip
