"""A group of one value: the output is a constant, whatever the input is.

## What it does
Finds normalisation layers (group, instance, layer and batch norm) that normalise over a single value, gives a copy of
them two different inputs, and compares what they make of them.

## Why is this bad?
One value is its own mean: it becomes zero, and the layer gives its beta. Nothing of the input reaches the rest of the
network, no gradient comes back, and nothing raises: ``GroupNorm(4, 4)`` of (batch, 4) erases its input. Batch and
instance norm raise in training, but not in evaluation.

## Example
```python
nn.Sequential(nn.Linear(8, 4), nn.GroupNorm(4, 4))
```

## Use instead
```python
nn.Sequential(nn.Linear(8, 4), nn.GroupNorm(1, 4))
```

## Fix safety
Unsafe: a GroupNorm gets fewer groups, of at least 16 channels where it has so many. That changes the function, which
was a constant. For other layers there is no fix.

## References
- pytorch/opacus#567
- pytorch/pytorch#1381
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.switches import uses
from batchnorm.preserve import in_mode, random_states
from batchnorm.records import Change, Finding, Report

GROUP = 16  # channels, as in the paper of group normalisation


def look(subject: Subject) -> Iterator[Finding]:
    """Look at the shapes that the layers are given, then try those whose groups have one value."""
    kinds = (nn.GroupNorm, nn.LayerNorm, _InstanceNorm, _BatchNorm)
    seen: dict[nn.Module, tuple[str, Tensor]] = {}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor) and _values(module, given[0]) == 1 and not given[0].is_meta:
            seen.setdefault(module, (path, given[0].detach().clone()))

    with subject.looking(note, lambda module: isinstance(module, kinds)) as model:
        subject.run(in_mode(model, False), subject.example)
    for module, (path, x) in seen.items():
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            yield from _of_training(subject, path, module, x)
        else:
            made = _made(module, x)
            if isinstance(made, float) and made < 1e-5:
                maps = x.dim() > 2
                kind = "of maps of one pixel" if maps else "of the input"
                yield RULE.found(
                    path,
                    f"{_name(module)} of {tuple(x.shape)} normalises over one value {kind}: the output is constant "
                    f"(for another input it differs by {made:.1g})",
                    "fewer groups (GroupNorm(1, channels) is a layer norm), or larger maps",
                    # The size of a map depends on the image's, and another example may do; (batch, channels) stays so.
                    severity="warning" if maps and isinstance(module, nn.GroupNorm) else "error",
                    fix="unsafe" if isinstance(module, nn.GroupNorm) and module.num_channels > 1 else "none",
                    values=1, shape=list(x.shape), difference=made,
                )  # fmt: skip


def _values(module: nn.Module, x: Tensor) -> int:
    """How many values a group has; 0 where that cannot be said."""
    if isinstance(module, nn.LayerNorm):
        return torch.Size(module.normalized_shape).numel()
    if x.dim() < 2:
        return 0
    positions = x.shape[2:].numel()
    if isinstance(module, nn.GroupNorm):
        return positions * module.num_channels // module.num_groups
    if isinstance(module, _InstanceNorm):
        return positions if x.dim() > 2 else 0
    groups = module._groups(x) if isinstance(module, _BatchNormBase) else 1
    return x.shape[0] * positions // max(groups, 1)


def _of_training(subject: Subject, path: str, module: _BatchNorm | _InstanceNorm, x: Tensor) -> Iterator[Finding]:
    """Batch and instance norm of one value: what training does with it."""
    if isinstance(module, _BatchNorm):
        # In a model that is in evaluation mode, the example may well be a single one.
        if not subject.net.training or not uses(module, training=True)[0] or subject.waits:
            return
        severity, why = "advice", f"this example has one value per channel here {tuple(x.shape)}"
        repair = "larger batches or maps; or one_value='running' (bn.BatchNorm), for a last batch of one"
    else:
        severity, why = "error", f"maps of one pixel {tuple(x.shape)} have one value per channel and example"
        repair = "larger maps, or a norm over channels (GroupNorm, LayerNorm)"
    made = _made(module, x)
    if isinstance(made, str):
        yield RULE.found(path, f"{why}: training raises", repair, severity=severity, fix="none", values=1, raises=made)
    elif made < 1e-5:
        yield RULE.found(
            path, f"{why}: in training the output is constant (for another input it differs by {made:.1g})",
            repair, severity=severity, fix="none", values=1, difference=made,
        )  # fmt: skip


def _made(module: nn.Module, x: Tensor) -> float | str:
    """By how much the outputs for an input and for another one differ, in training mode; or what it raises."""
    with random_states():
        torch.manual_seed(0)
        other = torch.randn_like(x.double()).mul(3).add(1)
    group: Any = vars(module).get("process_group")
    twin = copy.deepcopy(module, {id(group): group} if group is not None else {}).train()
    try:
        with torch.no_grad():  # in float64: a single value is divided by the root of eps, and its rounding too
            first, second = twin.double()(x.double()), twin(other)
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return float((first - second).abs().max())


def _name(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"GroupNorm({module.num_groups}, {module.num_channels})"
    return type(module).__name__


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Make the groups larger."""
    modules = dict(repair.model.named_modules())
    changes = []
    for path in dict.fromkeys(finding.path for finding in findings):
        layer = modules[path]
        assert isinstance(layer, nn.GroupNorm)
        channels = layer.num_channels
        size = min(size for size in range(min(GROUP, channels), channels + 1) if channels % size == 0)
        changes.append(Change(path, "num_groups", layer.num_groups, channels // size))
        layer.num_groups = channels // size
    return Report(tuple(changes))


RULE = Rule(
    "BN111", "degenerate-group", "error", __doc__, look, ("model", "example"), fix=fix, safety="unsafe", keeps=False
)
