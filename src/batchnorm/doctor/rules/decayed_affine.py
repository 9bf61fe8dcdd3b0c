"""Weight decay on gamma and beta: the optimiser pulls every channel's scale toward zero.

## What it does
Finds the parameters of normalisation layers in optimiser groups that have a weight decay.

## Why is this bad?
For a weight in front of BN, decay sets the scale, which BN takes out again. For gamma it is a channel that fades, for
beta an activation that dies: the decay acts on the function itself, and more the smaller the gradient is. How much that
is depends on the learning rate: the finding says after how many steps decay alone would halve gamma. Large-batch
recipes for ImageNet leave gamma and beta out; so do `batchnorm.param_groups` and most recipes for transformers.

## Example
```python
torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
```

## Use instead
```python
torch.optim.SGD(bn.param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
```

## Fix safety
Safe: the model does not change. The groups are split in place, each keeping its settings and its state; the new ones
come last. If a schedule of the learning rate was made before, the fix is unsafe: the schedule does not know the new
groups, and has to be made again.

## References
- torch/torch7#846
- tensorflow/models#2755
- Goyal et al. (2017), section 5.1; He et al. (2019), section 3.1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.optim import _NORMS
from batchnorm.records import Change, Finding, Report

FAST = 500  # steps within which decay alone would halve gamma: then it is more than a matter of taste
NEVER = 10_000_000  # steps: no training is so long


def look(subject: Subject) -> Iterator[Finding]:
    """Look for the layers' parameters in groups that decay."""
    for path, layer in subject.net.named_modules():
        if not isinstance(layer, _NORMS):
            continue
        names = {id(p): name for name, p in layer._parameters.items() if p is not None}
        for optimizer in subject.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                decayed = [p for p in group["params"] if id(p) in names and _moves(p)] if _decay(group) else []
                if not decayed or not _reaches(optimizer, group, decayed[0]):
                    continue
                which = " and ".join(sorted((_word(names[id(p)]) for p in decayed), reverse=True))
                size = sum(p.numel() for p in decayed)
                steps = _half_life(group)
                if steps is not None and steps > NEVER:
                    continue
                halved = f": alone it would halve them in {steps:,} steps" if steps else ""
                kind = type(optimizer).__name__
                scheduled = "initial_lr" in group
                yield RULE.found(
                    path,
                    f"its {which} ({size} values) have weight decay {_decay(group):g} (group {index} of {kind})"
                    + halved,
                    "bn.param_groups(model, weight_decay) gives the optimiser groups that leave them out"
                    + ("; then make the learning rate's schedule again" if scheduled else ""),
                    severity="warning" if steps is not None and steps < FAST else "advice",
                    fix="unsafe" if scheduled else "safe",
                    weight_decay=_decay(group),
                    learning_rate=float(group.get("lr", 0.0)),
                    values=size,
                    group=index,
                    optimizer=kind,
                    **({} if steps is None else {"steps_to_half": steps}),
                )


def _decay(group: dict[str, Any]) -> float:
    return float(group.get("weight_decay") or 0.0)


def _reaches(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> bool:
    """Whether the optimizer decays a parameter of this shape: many of LARS and LAMB leave out what has one axis.

    Torch's own decay every parameter. Of others, a twin takes a step with a gradient of zero, unless the optimizer
    holds more than its groups, such as the optimizer that it wraps, or other processes would have to take part.
    """
    own = {key: value for key, value in vars(optimizer).items() if not key.startswith("_") and key != "step"}
    rest = [value for key, value in own.items() if key not in ("state", "param_groups", "defaults")]
    plain = all(isinstance(value, (bool, int, float, str, type(None))) for value in rest)
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if type(optimizer).__module__.partition(".")[0] == "torch" or not (plain and alone):
        return True
    probe = nn.Parameter(torch.ones(like.shape, dtype=torch.float64))
    probe.grad = torch.zeros_like(probe)
    try:
        groups: list[Any] = [{**group, "params": [probe], "lr": 0.1, "weight_decay": 0.1}]
        with torch.random.fork_rng(devices=()):
            type(optimizer)(groups, **optimizer.defaults).step()
    except Exception:  # foreign code: then the group's word counts
        return True
    return not torch.equal(probe.detach(), torch.ones_like(probe))


def _moves(parameter: nn.Parameter) -> bool:
    """Whether a step reaches a parameter: torch's optimisers skip what has no gradient."""
    return parameter.requires_grad or parameter.grad is not None


def _word(name: str) -> str:
    return {"weight": "gamma", "bias": "beta"}.get(name, name)


def _half_life(group: dict[str, Any]) -> int | None:
    """After how many steps decay alone leaves half of a parameter; None where the learning rate does not say so.

    >>> _half_life({"lr": 0.1, "weight_decay": 1e-2})
    693
    """
    rate = max(float(group.get("lr", 0.0)), float(group.get("initial_lr", 0.0))) * _decay(group)
    if "betas" in group and not group.get("decoupled_weight_decay", True):
        return None  # Adam divides the decay, with the gradient, by the gradient's size
    rate /= 1.0 - float(group.get("momentum") or 0.0)
    return None if not 0.0 < rate < 1.0 else round(math.log(0.5) / math.log1p(-rate))


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Split the groups."""
    paths = dict(repair.model.named_modules())
    spared = {id(p): (f.path, name) for f in findings for name, p in paths[f.path]._parameters.items() if p is not None}
    changes = [change for optimizer in repair.optimizers for change in _split(optimizer, spared)]
    return Report(tuple(changes))


def _split(optimizer: Optimizer, spared: dict[int, tuple[str, str]]) -> Iterator[Change]:
    for group in list(optimizer.param_groups):
        decay = _decay(group)
        ours = [id(p) in spared for p in group["params"]]
        if not decay or not any(ours):
            continue
        for parameter, own in zip(group["params"], ours, strict=True):
            if own:
                path, name = spared[id(parameter)]
                yield Change(path, f"weight decay of {_word(name)}", decay, 0.0)
        if all(ours):
            group["weight_decay"] = 0.0
            continue
        new = {**group, "weight_decay": 0.0}
        for key in ("params", "param_names"):  # torch keeps names beside the parameters if it was given them
            if key in group:
                new[key] = [item for item, own in zip(group[key], ours, strict=True) if own]
                group[key] = [item for item, own in zip(group[key], ours, strict=True) if not own]
        if "name" in group:
            new["name"] = f"{group['name']}_norms"
        optimizer.param_groups.append(new)


RULE = Rule("BN102", "decayed-affine", "advice", __doc__, look, ("model", "optimizer"), fix=fix, safety="safe")
