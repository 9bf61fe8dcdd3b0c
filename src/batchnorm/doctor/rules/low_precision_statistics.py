"""Statistics, gamma or beta in half precision, where averages stop to move and small variances become zero.

## What it does
Finds BN layers, in a model or a checkpoint, whose running statistics or parameters are float16 or bfloat16, and counts
the variances that have become zero or infinite.

## Why is this bad?
A running average moves by momentum times a difference. In bfloat16, which has 8 bits, with a momentum of 0.1, a move
is lost when the batch is within 4 % of the running value; in float16 within 0.5 %, where moreover a variance above
65504 is infinite (its channel is then constant) and one below 6e-8 is zero. Activations in half precision are fine: the
layers of torch and ours compute in float32 and take parameters in float32 beside them.

## Example
```python
model.half()
```

## Use instead
```python
with torch.autocast("cuda", torch.float16):  # or keep the BN layers of a half model in float32
    y = model(x)
```

## Fix safety
Safe: the tensors become float32 (optimiser states too), what the layer is given and gives keeps its type. What rounding
has lost does not come back: recompute the statistics with `batchnorm.calibrate`. A layer that does not take
tensors of both types (tried on a copy) is left alone.

## References
- pytorch/pytorch#115500
- pytorch/vision#2599
- NVIDIA/apex#144
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
from batchnorm.doctor.subject import Norm, Subject
from batchnorm.layers.switches import uses
from batchnorm.optim import state_of
from batchnorm.records import Change, Finding, Report

_STATISTICS, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_SHAPES = ((2,), (2, 2), (2, 2, 2), (2, 2, 2, 2))


def look(subject: Subject) -> Iterator[Finding]:
    """Look at the types, and at what they have done to the variances."""
    for norm in subject.norms:
        low = {
            name: tensor
            for name in (*_STATISTICS, *_AFFINE)
            if (tensor := getattr(norm, name)) is not None and _is_low(tensor.dtype)
        }
        if low:
            yield _found(norm, low)


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


def _found(norm: Norm, low: dict[str, Tensor]) -> Finding:
    words = {"weight": "gamma", "bias": "beta"}
    names = ", ".join(words.get(name, name) for name in low)
    dtype = str(next(iter(low.values())).dtype).removeprefix("torch.")
    fix = "none" if norm.layer is None or not _takes_both(norm.layer, next(iter(low.values())).dtype) else "safe"
    statistics = [low[name] for name in _STATISTICS if name in low]
    numbers: dict[str, Any] = {"dtype": dtype, "tensors": list(low)}
    if not statistics:
        step = torch.finfo(next(iter(low.values())).dtype).eps / 2
        numbers["relative_step"] = step
        return RULE.found(
            norm.path,
            f"its {names} are {dtype}: a step of the optimiser below {step:.1%} of a value is lost",
            "keep them in float32, and let autocast choose the type of the activations",
            severity="advice", fix=fix, **numbers,
        )  # fmt: skip
    var = low.get("running_var")
    zero = infinite = 0
    if var is not None and not var.is_meta:
        zero, infinite = int((var == 0).sum()), int(var.isinf().sum())
    numbers |= {"zero_variances": zero, "infinite_variances": infinite}
    learns = norm.layer is not None and uses(norm.layer)[1]
    momentum = 0.1 if norm.layer is None or norm.layer.momentum is None else float(norm.layer.momentum)
    lost = torch.finfo(statistics[0].dtype).eps / 2 / max(momentum, 1e-3)
    numbers["update_lost_within"] = lost
    sentence = f"its {names} are {dtype}"
    if zero or infinite:
        counts = [f"{n} of {var.numel()} variances {what}" for n, what in ((zero, "zero"), (infinite, "infinite")) if n]  # type: ignore[union-attr]
        sentence += f", with {' and '.join(counts)}"
    elif learns:
        sentence += f": an update within {lost:.2g} of the running value (relative) is lost"
    else:
        sentence += ", which training would need in float32"
    return RULE.found(
        norm.path, sentence, "keep BN layers in float32 (their input may be half); bn.calibrate measures what was lost",
        severity="error" if infinite else "warning" if zero or learns else "advice", fix=fix, **numbers,
    )  # fmt: skip


def _takes_both(layer: _BatchNorm, dtype: torch.dtype) -> bool:
    """Whether a layer in float32 takes and gives half precision, in both modes if in one process."""
    if any(t.is_meta for t in [*layer.parameters(), *layer.buffers()]):
        return False
    group: Any = vars(layer).get("process_group")
    twin: _BatchNorm = copy.deepcopy(layer, {id(group): group} if group is not None else {})
    _raise(twin)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    modes = (False,) if together else (False, True)  # a synchronised layer would wait for the others
    device = next((t.device for t in [*twin.parameters(), *twin.buffers()]), torch.device("cpu"))
    for shape in _SHAPES:
        x = torch.linspace(-1, 1, 2 * layer.num_features * 2 ** (len(shape) - 1), device=device).to(dtype)
        x = x.view(2, layer.num_features, *shape[1:])
        try:
            with torch.no_grad():
                made = [twin.train(training)(x) for training in modes]
        except Exception:  # other dimensions, or another type: the next shape tells
            continue
        return all(isinstance(y, Tensor) and y.dtype == dtype for y in made)
    return False


def _raise(layer: nn.Module) -> list[tuple[str, Tensor, torch.dtype]]:
    """Make a layer's own half tensors float32; parameters stay the same objects."""
    raised: list[tuple[str, Tensor, torch.dtype]] = []
    for name, parameter in layer._parameters.items():
        if parameter is not None and _is_low(parameter.dtype):
            raised.append((name, parameter, parameter.dtype))
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if gradient is None else gradient.float()
    for name, buffer in layer._buffers.items():
        if buffer is not None and _is_low(buffer.dtype):
            raised.append((name, buffer, buffer.dtype))
            layer._buffers[name] = buffer.float()
    return raised


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Make the tensors float32, with what the optimisers keep of them."""
    modules = dict(repair.model.named_modules())
    changes: list[Change] = []
    for path in dict.fromkeys(finding.path for finding in findings):
        for name, tensor, before in _raise(modules[path]):
            changes.append(Change(path, name, str(before).removeprefix("torch."), "float32"))
            for optimizer in repair.optimizers:
                state = state_of(optimizer).get(tensor, {})
                state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype == before})
    return Report(tuple(changes))


RULE = Rule("BN109", "low-precision-statistics", "warning", __doc__, look, ("tensors",), fix=fix, safety="safe")
