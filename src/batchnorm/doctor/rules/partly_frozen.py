"""A layer that is only partly frozen: its statistics still move, or the next ``train()`` lets them.

## What it does
Finds BN layers in training mode whose gamma and beta do not learn (``requires_grad`` is off) but whose running
statistics do, and layers in evaluation mode inside a model in training mode: it calls ``model.train()``, as every epoch
does, and looks whether they stay frozen. While training runs, it notices a layer that was frozen by ``eval()`` for some
steps, and is not any more; one that nothing trains, as no optimiser has its parameters and no gradient reaches it; and
the other half: a model that trained in training mode, was put into evaluation mode to
validate, and trains on in it, so that gamma, beta and weights learn and the statistics stand still. Layers that are in
evaluation mode from the first step on, or while the model itself is in training mode, are frozen on purpose (of new
ones BN202 speaks).

## Why is this bad?
``requires_grad = False`` does not reach buffers: the "frozen" backbone normalises with batch statistics, and its
running ones drift to the new data, so that it gives other features after training than before. ``layer.eval()`` stops
that until the next ``model.train()``, which sets the mode of every module. And where nobody calls ``model.train()``
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
learn as before. Unsafe for a layer that normalises with the batch now: frozen, it uses its running statistics, which
changes training. Both go through `batchnorm.freeze`.

## References
- pytorch/pytorch#86590
- Lightning-AI/pytorch-lightning#15062
- yunjey/pytorch-tutorial, image_captioning (features without gradients, statistics that move)
- lightly-ai/lightly#1438 (the same, on purpose: a momentum encoder, which is not reported)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import Run, uses
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, Watcher
from batchnorm.preserve import untouched
from batchnorm.records import Finding, Report
from batchnorm.transforms.freeze import cannot_freeze, freeze

_REPAIR = "bn.freeze(model, modules) freezes statistics, gamma and beta, and survives train()"
ON = "call model.train() after the validation; bn.freeze(model, modules) if the statistics are to stand still"
FORGOTTEN = 3  # steps in a row of a model in evaluation mode
UNLEARNT = 3  # steps in a row: a GAN's discriminator is held still in the generator's steps, and learns in its own
STEPS = 2  # of which a layer has to be frozen before its thaw counts: loops that alternate modes do so every step


def look(subject: Subject) -> Iterator[Finding]:
    """Look at modes and gradients, and at what ``train()`` makes of the modes."""
    model = subject.net
    if not model.training:  # nobody trains it now: what learns then is not known
        return
    modes = {path: layer.training for path, layer in subject.layers}
    with untouched(model):
        model.train()
        after = {path: layer.training for path, layer in subject.layers}
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
        elif uses(layer, training=True)[1] and _is_meant_frozen(model, path, layer):
            whole = not any(p.requires_grad for p in model.parameters())
            moves = "1 / (its batches)" if layer.momentum is None else f"{layer.momentum:.0%}"
            what = "its gamma and beta do not learn" if _affine(layer) else "everything around it is frozen"
            yield RULE.found(
                path,
                f"{what}, but its running statistics move by {moves} toward every batch's",
                _REPAIR,
                severity="advice" if whole else None,
                fix=fix or "unsafe",
                momentum=-1.0 if layer.momentum is None else float(layer.momentum),
                batches=0 if layer.num_batches_tracked is None else _count(layer),
            )


def _affine(layer: _BatchNorm) -> list[nn.Parameter]:
    return [p for p in (layer.weight, layer.bias) if isinstance(p, nn.Parameter)]


def _count(layer: _BatchNorm) -> int:
    assert layer.num_batches_tracked is not None
    return 0 if layer.num_batches_tracked.is_meta else int(layer.num_batches_tracked)


Learns = Callable[[nn.Parameter], bool]


def _requires_grad(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _is_meant_frozen(model: nn.Module, path: str, layer: _BatchNorm, learns: Learns = _requires_grad) -> bool:
    own = _affine(layer)
    if any(learns(p) for p in own):
        return False
    modules = dict(model.named_modules())
    around = [path.rpartition(".")[0]] if path else []
    while around and around[-1]:
        around.append(around[-1].rpartition(".")[0])
    frozen = [name for name in around if _is_frozen(modules[name], learns)]
    if not own and not [name for name in frozen if name]:
        return False  # nothing of it could learn, and nothing else says that it is meant to be frozen
    return not any(_has_twin(model, modules[name], learns) for name in frozen if name)


def _is_frozen(module: nn.Module, learns: Learns) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(learns(p) for p in parameters)


def _has_twin(model: nn.Module, frozen: nn.Module, learns: Learns) -> bool:
    """Whether another module of the same make learns: then this one is its teacher or momentum encoder."""
    shapes = _shapes(frozen)
    return any(
        other is not frozen
        and type(other) is type(frozen)
        and not _is_frozen(other, learns)
        and _shapes(other) == shapes
        for other in model.modules()
    )


def _shapes(module: nn.Module) -> Mapping[str, Any]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


class _Forgotten:
    """Follows a model that was put into evaluation mode, and in which nobody called ``train()`` again."""

    def __init__(self) -> None:
        self.trains: set[str] = set()  # layers that began in training mode, or whose statistics moved in a step
        self.validated = False  # a call in evaluation mode, without gradients, since a step in training mode
        self.still: set[str] = set()  # since the last step: layers that ran for gradients in evaluation mode
        self.moved: set[str] = set()  # and those that ran in training mode
        self.learnt: set[str] = set()  # and those whose gamma or beta got a gradient
        self.steps: dict[str, int] = {}  # in a row, that a layer learnt and stood still
        self.since = 0

    def begin(self, run: Run) -> None:
        self.trains = {path for path, layer in run.layers.items() if run.model.training and layer.training}

    def called(self, run: Run) -> None:
        if not run.model.training and not run.gradients and not self.validated:
            self.validated, self.since = True, run.step

    def passed(self, seen: Pass) -> None:
        (self.moved if seen.layer.training else self.still).add(seen.path)

    def stepped(self, run: Run) -> Iterator[Finding]:
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


class _Watcher(Watcher):
    """Counts the steps in which a layer ran in evaluation mode only, while the model trained."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}  # since the last step: layers that ran frozen; whether gamma and beta learn
        self.moved: set[str] = set()  # since the last step: layers whose statistics moved
        self.frozen: dict[str, tuple[int, bool]] = {}  # steps in a row, and whether gamma and beta learnt
        self.ever: set[str] = set()  # layers whose statistics moved before
        self.validated = False  # since the last step
        self.learns: bool | None = None
        self.learning: set[str] = set()  # since the last step: layers that ran with gamma or beta to learn
        self.still: dict[str, int] = {}  # steps in a row in which statistics moved, and nothing of the layer learnt
        self.forgotten = _Forgotten()

    def on_begin(self, run: Run) -> Iterator[Finding]:
        self.forgotten.begin(run)
        yield from ()

    def on_call(self, run: Run, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.validated = self.validated or not run.model.training
        self.forgotten.called(run)
        yield from ()

    def on_pass(self, run: Run, seen: Pass) -> Iterator[Finding]:
        if not seen.gradients or seen.recomputed:
            return
        self.forgotten.passed(seen)
        if not run.model.training:
            return
        path, layer = seen.path, seen.layer
        learns = any(p.requires_grad for p in _affine(layer))
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
        if learns:
            self.learning.add(path)
        self.moved.add(path)

    def on_backward(self, run: Run, path: str) -> Iterator[Finding]:
        self.forgotten.learnt.add(path)
        yield from ()

    def on_step(self, run: Run) -> Iterator[Finding]:
        yield from self.forgotten.stepped(run)
        for path in sorted(self.moved):
            yield from self._unlearnt(run, path, run.layers[path])
        for path in self.moved:
            self.frozen.pop(path, None)
        for path, learns in self.held.items():
            if path not in self.moved:
                self.frozen[path] = (self.frozen.get(path, (0, learns))[0] + 1, learns)
        self.ever |= self.moved
        self.held, self.moved, self.learning, self.validated, self.learns = {}, set(), set(), False, None

    def _unlearnt(self, run: Run, path: str, layer: _BatchNorm) -> Iterator[Finding]:
        own = _affine(layer)
        learns: Learns = _requires_grad
        if path in self.learning:
            if not run.optimizers or any(p.grad is not None for p in own):
                self.still[path] = 0
                return
            held = {id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]}
            learns = lambda p: p.requires_grad and id(p) in held  # noqa: E731
        if not own or any(learns(p) for p in own) or not self._trains(run.model):
            self.still[path] = 0
            return
        self.still[path] = self.still.get(path, 0) + 1
        if self.still[path] == UNLEARNT and _is_meant_frozen(run.model, path, layer, learns):
            why = (
                "its gamma and beta do not learn"
                if learns is _requires_grad
                else ("no gradient reaches it, and the optimiser has none of its parameters")
            )
            yield RULE.found(
                path,
                f"{why}, but its running statistics move with every training batch",
                _REPAIR,
                fix="none", step=run.step, call=run.call, steps=UNLEARNT,
            )  # fmt: skip

    def _trains(self, model: nn.Module) -> bool:
        if self.learns is None:
            self.learns = any(p.requires_grad for p in model.parameters())
        return self.learns


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Freeze them so that it lasts; what learnt goes on to learn."""
    paths = list(dict.fromkeys(finding.path for finding in findings))
    modules = dict(patient.model.named_modules())
    affine = [p for path in paths for p in modules[path].parameters(recurse=False)]
    before = [(p, p.requires_grad, p.grad) for p in affine]
    _, report = freeze(patient.model, paths, inplace=True)
    for parameter, learnt, gradient in before:
        parameter.requires_grad_(learnt)
        parameter.grad = gradient
    kept = tuple(c for c in report.changes if c.what != "learn")
    return Report(kept, report.left)


RULE = Rule("BN105", "partly-frozen", "warning", __doc__, look, ("model",), watch=_Watcher, fix=fix, safety="safe")
