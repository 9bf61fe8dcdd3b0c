"""A layer that is only partly frozen: its statistics still move, or the next ``train()`` lets them.

## What it does
Finds BN layers in training mode whose gamma and beta do not learn (``requires_grad`` is off) but whose running
statistics do, and layers in evaluation mode inside a model in training mode: it calls ``model.train()``, as every epoch
does, and looks whether they stay frozen. Given the optimizer, it also reports layers whose gamma and beta no optimizer
holds, such as those of a teacher or a feature extractor that was left in training mode. A part that has nearly the
same parameters as another one of its make that learns is a copy (a momentum encoder), and may move. And it reports an
attribute such as ``freeze_bn`` or ``norm_eval`` that is True on a module whose BN layers train nevertheless, for
example because it hides the method of that name.

While training runs, it reports the same where the parameters stay as they are for 3 steps (10 if the optimizer is not
given, 50 for a copy), also under ``torch.no_grad()`` and where no gradient reaches the layer; a layer that was frozen
by ``eval()`` for some steps, and is not any more; and the other half: a model that trained in training mode, was put
into evaluation mode to validate, and trains on in it, so that gamma, beta and weights learn and the statistics stand
still. Layers that are in evaluation mode from the first step on, or while the model itself is in training mode, are
frozen on purpose (new ones are reported by BN202).

## Why is this bad?
``requires_grad = False`` does not reach buffers: the "frozen" backbone normalises with batch statistics, and its
running ones drift to the new data, so that it gives other features after training than before. ``layer.eval()`` stops
that until the next ``model.train()``, which sets the mode of every module. And if ``model.train()`` is not called
after a validation, the running statistics are those of weights that are long gone, and dropout is off.

## Example
```python
for p in model.backbone.parameters():
    p.requires_grad = False
model.train()
```

## Use instead
```python
model, report = bn.freeze(model, "backbone")  # survives train()
```

## Fix safety
Safe for a layer that is in evaluation mode now: it keeps doing what it does, also after ``train()``, and gamma and beta
learn as before. Unsafe for a layer that normalises with the batch now, also in a module whose attribute says that it is
frozen: it then uses its running statistics, which changes training. Both go through `batchnorm.freeze`.

## References
- pytorch/pytorch#86590
- Lightning-AI/pytorch-lightning#15062
- yunjey/pytorch-tutorial, image_captioning (features without gradients, statistics that move)
- lightly-ai/lightly#1438 (the same, on purpose: a momentum encoder, which is not reported)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.learning import (
    Flag,
    Learns,
    affine,
    first_values,
    flags,
    frozen_around,
    held_by,
    held_in,
    meant_frozen,
    requires_grad,
)
from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.preserve import untouched
from batchnorm.records import Finding, Report
from batchnorm.transforms.freeze import cannot_freeze, freeze

_REPAIR = "bn.freeze(model, modules) freezes statistics, gamma and beta, and survives train()"
ON = "call model.train() after the validation; bn.freeze(model, modules) if the statistics are to stand still"
FORGOTTEN = 3  # steps in a row of a model in evaluation mode
UNLEARNT = 3  # steps in a row: a GAN's discriminator is held still in the generator's steps, and learns in its own
UNKNOWN = 10  # where the optimizers are not given: the one that holds the layer may not have stepped yet
COPY = 50  # of a part that is a copy of one that learns: it may follow now and then
STEPS = 2  # of which a layer has to be frozen before its thaw counts: loops that alternate modes do so every step


def look(subject: Subject) -> Iterator[Finding]:
    """Look at modes and gradients, and at what ``train()`` makes of the modes."""
    model = subject.net
    if not model.training:  # not in training: which parameters will learn is unknown
        return
    modes = {path: layer.training for path, layer in subject.layers}
    with untouched(model):
        model.train()
        after = {path: layer.training for path, layer in subject.layers}
    learns = held_by(subject.optimizers) if subject.optimizers else requires_grad
    layers = dict(subject.layers)
    for flag in flags(model, list(layers)):
        moving = [path for path in flag.layers if modes[path] and after[path] and uses(layers[path], training=True)[1]]
        if moving:
            yield _flagged(flag, moving, not any(cannot_freeze(layers[path]) for path in moving))
    for path, layer in subject.layers:
        fix = "none" if cannot_freeze(layer) else None
        if not modes[path]:
            tracked = layer.running_mean is not None
            if after[path] and tracked and uses(layer, training=True)[0]:
                yield RULE.found(
                    path,
                    "it is in evaluation mode, but the next model.train() puts it back into training mode (tried here)",
                    f"{_REPAIR}; or override the model's train()",
                    severity="advice",
                    fix=fix or "safe",
                    mode_now=modes[path],
                    mode_after_train=after[path],
                )
        elif uses(layer, training=True)[1] and meant_frozen(model, path, layer, learns):
            whole = not any(learns(p) for p in model.parameters())
            moves = "1 / (its batches)" if layer.momentum is None else f"{layer.momentum:.0%}"
            yield RULE.found(
                path,
                f"{_unlearnt(layer)}, but its running statistics move by {moves} toward every batch's",
                _REPAIR,
                severity="advice" if whole else None,
                fix=fix or "unsafe",
                momentum=-1.0 if layer.momentum is None else float(layer.momentum),
                batches=0 if layer.num_batches_tracked is None else _count(layer),
            )


def _unlearnt(layer: _BatchNorm) -> str:
    """Say why nothing of a layer learns."""
    own = affine(layer)
    if not own:
        return "everything around it is frozen"
    return (
        "its gamma and beta are in no optimizer"
        if any(p.requires_grad for p in own)
        else ("its gamma and beta do not learn")
    )


def _flagged(flag: Flag, moving: Sequence[str], fixable: bool, step: int | None = None) -> Finding:
    return RULE.found(
        flag.path,
        f"{flag.words}; but train() leaves {len(moving)} of its {len(flag.layers)} BN layers in training mode, "
        f"and their statistics move ({moving[0]} is the first)",
        _REPAIR,
        fix="unsafe" if fixable and step is None else "none",
        step=step,
        attribute=flag.attribute,
        hides_method=flag.hides,
        layers=list(moving),
    )


def _count(layer: _BatchNorm) -> int:
    assert layer.num_batches_tracked is not None
    return 0 if layer.num_batches_tracked.is_meta else int(layer.num_batches_tracked)


class _Forgotten:
    """Follows a model that was put into evaluation mode, and not back into training mode."""

    def __init__(self) -> None:
        self.trains: set[str] = set()  # layers that began in training mode, or whose statistics moved in a step
        self.validated = False  # a call in evaluation mode, without gradients, since a step in training mode
        self.still: set[str] = set()  # since the last step: layers that ran for gradients in evaluation mode
        self.moved: set[str] = set()  # and those that ran in training mode
        self.learnt: set[str] = set()  # and those whose gamma or beta got a gradient
        self.steps: dict[str, int] = {}  # in a row, that a layer learnt and stood still
        self.since = 0

    def begin(self, run: TrainingRun) -> None:
        self.trains = {path for path, layer in run.layers.items() if run.model.training and layer.training}

    def called(self, run: TrainingRun) -> None:
        if not run.model.training and not run.gradients and not self.validated:
            self.validated, self.since = True, run.step

    def passed(self, seen: Pass) -> None:
        (self.moved if seen.layer.training else self.still).add(seen.path)

    def stepped(self, run: TrainingRun) -> Iterator[Finding]:
        """Count a step; one in which any layer ran in training mode ends the row of all."""
        still, moved, learnt = self.still, self.moved, self.learnt
        self.still, self.moved, self.learnt = set(), set(), set()
        if run.model.training or moved:
            self.trains |= moved
            self.steps.clear()
            self.validated = False
            return
        if not self.validated:  # a step in evaluation mode that no validation came before: it is meant
            self.trains -= still
        for path in sorted(still & learnt & self.trains):
            layer = run.layers[path]
            if not uses(layer, training=True)[1]:  # frozen by its own switches
                continue
            self.steps[path] = self.steps.get(path, 0) + 1
            if self.steps[path] == FORGOTTEN:
                yield RULE.found(
                    path,
                    f"the model has been in evaluation mode since the validation after step {self.since}, and trains "
                    f"in it: gamma and beta learnt in {FORGOTTEN} steps, the running statistics stand still",
                    ON,
                    fix="none", step=run.step, call=run.call, since_step=self.since, steps=FORGOTTEN,
                )  # fmt: skip


class _Still:
    """Follows layers whose statistics move and of which nothing learns: gamma and beta are in no optimizer, or frozen.

    A part without gradients whose parameters change nevertheless follows another one (a momentum encoder), and its
    statistics are meant to move.
    """

    def __init__(self) -> None:
        self.moved: set[str] = set()  # since the last step, with gradients or without
        self.steps: dict[str, int] = {}  # in a row
        self.values: dict[str, tuple[list[nn.Parameter], list[Tensor]]] = {}  # what stood there in the first of them
        self.follows: set[str] = set()
        self.flags: list[Flag] = []
        self.flagged: dict[str, int] = {}
        self.held: tuple[Any, Learns] = (None, requires_grad)
        self.others: set[int] = set()  # the parameters of the optimizers that are not stepping

    def begin(self, run: TrainingRun) -> None:
        self.flags = list(flags(run.model, list(run.layers)))

    def stepped(self, run: TrainingRun) -> Iterator[Finding]:
        """Count a step."""
        moved, self.moved = self.moved, set()
        if not moved:
            return
        learns = self._learns(run)
        if any(p.requires_grad for p in run.model.parameters()):
            others = [o for o in run.known_optimizers if o is not run.stepping]
            self.others = held_in(others) - held_in([run.stepping] if run.stepping else ()) if others else set()
            for path in sorted(moved - self.follows):
                yield from self._layer(run, path, learns)
        for flag in self.flags:
            moving = [path for path in flag.layers if path in moved]
            self.flagged[flag.path] = self.flagged.get(flag.path, 0) + 1 if moving else 0
            if self.flagged[flag.path] == UNLEARNT:
                yield _flagged(flag, moving, fixable=False, step=run.step)

    def _learns(self, run: TrainingRun) -> Learns:
        known = run.known_optimizers
        key = [(id(o), sum(len(group["params"]) for group in o.param_groups)) for o in known]
        if self.held[0] != key:
            self.held = key, held_by(known)
        return self.held[1]

    def _layer(self, run: TrainingRun, path: str, learns: Learns) -> Iterator[Finding]:
        layer = run.layers[path]
        own = affine(layer)
        held = any(learns(p) for p in own)
        if any(id(p) in self.others for p in own):
            return  # a step of another network's optimizer, in which this one may stand still
        reached = any(p.grad is not None for p in own)
        if held and reached:
            self.steps[path] = 0
            return
        learning: Learns = (lambda p: learns(p) and p.grad is not None) if held else learns
        self.steps[path] = steps = self.steps.get(path, 0) + 1
        if steps == 1:
            around = frozen_around(run.model, path, learning)
            parameters = list(around[-1].parameters()) if around else affine(layer)
            self.values[path] = parameters, first_values(parameters)
        soon = UNLEARNT if run.optimizers else UNKNOWN
        if steps not in (soon, COPY) or path not in self.values:
            return
        parameters, before = self.values[path]
        if any(not torch.equal(a, b) for a, b in zip(first_values(parameters), before, strict=True)):
            self.follows.add(path)
        elif meant_frozen(run.model, path, layer, learning, copies=steps == COPY):
            why = "no gradient reaches its gamma and beta" if held else _unlearnt(layer)
            yield RULE.found(
                path,
                f"{why}, but its running statistics move with every training batch",
                _REPAIR,
                fix="none", step=run.step, call=run.call, steps=steps,
            )  # fmt: skip


class _Watcher(Watcher):
    """Counts the steps in which a layer ran in evaluation mode only, while the model trained."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}  # since the last step: layers that ran frozen; whether gamma and beta learn
        self.moved: set[str] = set()  # since the last step: layers whose statistics moved
        self.frozen: dict[str, tuple[int, bool]] = {}  # steps in a row, and whether gamma and beta learnt
        self.ever: set[str] = set()  # layers whose statistics moved before
        self.validated = False  # since the last step
        self.still = _Still()
        self.forgotten = _Forgotten()

    def on_begin(self, run: TrainingRun) -> Iterator[Finding]:
        self.forgotten.begin(run)
        self.still.begin(run)
        yield from ()

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.validated = self.validated or not run.model.training
        self.forgotten.called(run)
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if seen.recomputed:
            return
        if seen.updates:
            self.still.moved.add(seen.path)
        if not seen.gradients:
            return
        self.forgotten.passed(seen)
        if not run.model.training:
            return
        path, layer = seen.path, seen.layer
        learns = any(p.requires_grad for p in affine(layer))
        if not layer.training and not seen.updates and layer.running_mean is not None:
            if uses(layer, training=True)[0]:
                self.held[path] = learns
            return
        if not seen.updates:
            return
        steps, learnt = self.frozen.get(path, (0, False))
        # Who thaws on purpose lets gamma and beta learn again as well.
        if steps >= STEPS and (path not in self.ever or self.validated) and learns == learnt:
            yield RULE.found(
                path,
                f"it was frozen by eval() for {steps} steps, and train() has undone that: its statistics move again",
                _REPAIR,
                fix="none", step=run.step, steps_frozen=steps, call=run.call,
            )  # fmt: skip
        self.moved.add(path)

    def on_backward(self, run: TrainingRun, path: str) -> Iterator[Finding]:
        self.forgotten.learnt.add(path)
        yield from ()

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        yield from self.forgotten.stepped(run)
        yield from self.still.stepped(run)
        for path in self.moved:
            self.frozen.pop(path, None)
        for path, learns in self.held.items():
            if path not in self.moved:
                self.frozen[path] = (self.frozen.get(path, (0, learns))[0] + 1, learns)
        self.ever |= self.moved
        self.held, self.moved, self.validated = {}, set(), False


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Freeze the layers with `batchnorm.freeze`; gamma and beta that learnt still learn."""
    # A finding about an attribute names the module that has it, and the layers in it among its numbers.
    paths = list(dict.fromkeys(path for f in findings for path in f.numbers.get("layers", [f.path])))
    modules = dict(repair.model.named_modules())
    affine = [p for path in paths for p in modules[path]._parameters.values() if p is not None]
    before = [(p, p.requires_grad, p.grad) for p in affine]
    _, report = freeze(repair.model, paths, inplace=True)
    for parameter, learnt, gradient in before:
        parameter.requires_grad_(learnt)
        parameter.grad = gradient
    kept = tuple(c for c in report.changes if c.what != "learn")
    return Report(kept, report.left)


RULE = Rule("BN105", "partly-frozen", "warning", __doc__, look, ("model",), watch=_Watcher, fix=fix, safety="safe")
