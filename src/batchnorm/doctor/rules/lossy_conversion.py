"""A conversion that lost what a BN layer did beside normalising.

## What it does
With the model as it was (``before=``), it gives every BN layer that has another class now the same tensors and the same
input as its predecessor, and compares what they make. Without, it looks for the trace that torch's
``convert_sync_batchnorm`` leaves: a plain layer with submodules that it never calls. In a model that is being
synchronised (ranks are given, or some layers are synchronised already) it tries the conversion on those that are
not.

## Why is this bad?
``convert_sync_batchnorm`` makes a bare SyncBatchNorm of every subclass of BN: an activation, dropout or ghost batches
inside are gone, without a word. The network trains all the same, as another function: in the thread, with an F1 of
0.82 in training, and 0.00 when the weights were loaded into the model as it was defined.

## Example
```python
model = timm.create_model("resnetv2_50d")  # BatchNormAct2d: norm and ReLU in one
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # no ReLU any more
```

## Use instead
```python
model, report = bn.convert(model, "sync")
```

## Fix safety
Unsafe, and only with ``before=``: the layer becomes again what it was, synchronised by `batchnorm.convert`, with the
parameters and statistics that it has now. That changes the function, back to the one that was meant; weights that were
trained without the lost part may have to be trained again.

## References
- pytorch/pytorch#187298
- huggingface/pytorch-image-models#1254
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.sync import Synchronised
from batchnorm.preserve import in_mode, random_states, untouched
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.convert import convert

LOST = 1e-3  # of what the layer made: more than rounding, less than any activation
_TORCHS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHAPES = ((66,), (66, 3), (66, 3, 3), (66, 2, 2, 2))  # batches that hold two ghost batches of the usual size
_REPAIR = "bn.convert(model, 'sync') keeps what a class does; convert the original model again"


def look(subject: Subject) -> Iterator[Finding]:
    """Compare with the model before; or look for what torch's conversion leaves, or would lose."""
    reported: set[str] = set()
    if subject.before is not None:
        for finding in _compared(subject, subject.before):
            reported.add(finding.path)
            yield finding
    syncing = subject.process_group is not None or any(isinstance(m, nn.SyncBatchNorm) for _, m in subject.layers)
    for path, layer in subject.layers:
        if path in reported:
            continue
        dead = _uncalled(layer)
        if dead:
            yield RULE.found(
                path,
                f"it is a plain {type(layer).__name__} that never calls its {', '.join(dead)}: a conversion "
                "removed the class that did",
                _REPAIR, fix="none", submodules=len(dead), lost=list(dead),
            )  # fmt: skip
        elif syncing and not isinstance(layer, (Synchronised, *_TORCHS[3:])) and type(layer) not in _TORCHS:
            lost = _would_lose(layer)
            if lost > LOST:
                yield RULE.found(
                    path,
                    f"torch's convert_sync_batchnorm would make a plain layer of this {type(layer).__name__}, and "
                    f"change its output by {lost:.0%} (tried on a copy)",
                    "bn.convert(model, 'sync') keeps what a class does", severity="advice", fix="none", change=lost,
                )  # fmt: skip


# ---- with the model before


def _compared(subject: Subject, before: nn.Module) -> Iterator[Finding]:
    old = {path: m for path, m in before.named_modules() if isinstance(m, _BatchNorm)}
    pairs = {
        path: (old[path], layer)
        for path, layer in subject.layers
        if path in old and type(old[path]) is not type(layer) and old[path].num_features == layer.num_features
    }
    inputs = _inputs(subject, before, [was for was, _ in pairs.values()]) if pairs else {}
    for path, (was, now) in pairs.items():
        lost = _difference(was, now, inputs.get(was))
        if lost > LOST:
            yield RULE.found(
                path,
                f"it was a {type(was).__name__} and is a {type(now).__name__}: given the same tensors, its output "
                f"differs by {lost:.0%}",
                _REPAIR, change=lost, was=type(was).__name__, now=type(now).__name__,
            )  # fmt: skip


def _inputs(subject: Subject, before: nn.Module, layers: list[_BatchNorm]) -> dict[_BatchNorm, Tensor]:
    """What the layers of the model before are given, if there is an example that it takes."""
    seen: dict[_BatchNorm, Tensor] = {}
    if subject.example is None:
        return seen

    def note(layer: Any, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor):
            seen.setdefault(layer, given[0].detach().clone())

    with untouched(before), torch.no_grad():
        for layer in layers:
            layer.register_forward_hook(note)
        try:
            subject.run(in_mode(before, False), subject.example)
        except Exception:  # it takes other inputs: random ones do
            seen.clear()
    return seen


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in {**layer._parameters, **layer._buffers}.items() if t is not None}


def _difference(was: _BatchNorm, now: _BatchNorm, x: Tensor | None) -> float:
    """How much two layers with the same tensors differ in evaluation, and in training if in one process."""
    first, second = _alone(was), _alone(now)
    mine = _tensors(first)
    with torch.no_grad():
        for name, tensor in _tensors(second).items():
            if name in mine and mine[name].shape == tensor.shape:
                tensor.copy_(mine[name])
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    measured = [_apart(first, second, x, False), None if together else _apart(first, second, None, True)]
    return max((m for m in measured if m is not None), default=0.0)


def _alone(layer: _BatchNorm) -> _BatchNorm:
    group: Any = vars(layer).get("process_group")
    twin: _BatchNorm = copy.deepcopy(layer, {id(group): group} if group is not None else {})
    for hooks in (twin._forward_hooks, twin._forward_pre_hooks):
        hooks.clear()
    return twin


def _apart(first: _BatchNorm, second: _BatchNorm, x: Tensor | None, training: bool) -> float | None:
    like = next((t for t in [*first.parameters(), *first.buffers()] if t.is_floating_point()), torch.zeros(1))
    with random_states():
        torch.manual_seed(0)
        shapes = [(n, first.num_features, *rest) for n, *rest in _SHAPES]
        tries = [x] if x is not None else [torch.randn(s, dtype=like.dtype, device=like.device) for s in shapes]
        for given in tries:
            made = []
            for layer in (first, second):
                layer.train(training)
                for child in layer.children():  # what drops at random would differ by chance
                    child.eval()
                try:
                    with torch.no_grad():
                        made.append(layer(given.clone()))
                except Exception:  # it takes other dimensions, or this batch is too small to train on
                    break
            if len(made) == 2 and all(isinstance(y, Tensor) for y in made) and made[0].shape == made[1].shape:
                a, b = (y.double() for y in made)
                size = float(a.square().mean().sqrt()) or 1.0
                return float((a - b).square().mean().sqrt()) / size
    return None


# ---- without it


def _uncalled(layer: _BatchNorm) -> dict[str, str]:
    """The submodules that torch's own layers have been given, and do not call, if they would do something."""
    if type(layer) not in _TORCHS or layer._forward_hooks or layer._forward_pre_hooks:
        return {}
    return {
        f"{name} ({type(child).__name__})": name
        for name, child in layer.named_children()
        if _does_something(child, layer.num_features)
    }


def _does_something(child: nn.Module, channels: int) -> bool:
    with untouched(child), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(4, channels, 3, 3)
        try:
            return not torch.equal(child.train()(x.clone()), x)
        except Exception:  # who knows what it needs
            return True


def _would_lose(layer: _BatchNorm) -> float:
    bare: _BatchNorm = nn.SyncBatchNorm.convert_sync_batchnorm(_alone(layer))  # type: ignore[no-untyped-call]
    return _difference(layer, bare, None)


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Put the classes of before back, with the tensors of now."""
    changes: list[Change] = []
    left: dict[str, str] = {}
    for path in dict.fromkeys(finding.path for finding in findings):
        if repair.before is None:
            left[path] = "the model before is not known (before=)"
            continue
        now, was = repair.model.get_submodule(path), repair.before.get_submodule(path)
        assert isinstance(now, _BatchNorm)
        assert isinstance(was, _BatchNorm)
        new = copy.deepcopy(was).train(now.training)
        new._parameters.update({name: p for name, p in now._parameters.items() if name in new._parameters})
        new._buffers.update({name: t for name, t in now._buffers.items() if name in new._buffers})
        if isinstance(now, (nn.SyncBatchNorm, Synchronised)):
            _, report = convert(new, "sync", process_group=vars(now).get("process_group"), inplace=True)
            if report.left:
                left[path] = f"not synchronised: {next(iter(report.left.values()))}"
        changes.append(Change(path, "class", type(now).__name__, type(new).__name__))
        for owner in list(repair.model.modules()):
            for name, child in owner._modules.items():
                if child is now:
                    owner._modules[name] = new
        if repair.model is now:
            repair.model = new
    return Report(tuple(changes), left)


RULE = Rule(
    "BN107", "lossy-conversion", "error", __doc__, look, ("model",), fix=fix, safety="unsafe", keeps=False
)  # fmt: skip
