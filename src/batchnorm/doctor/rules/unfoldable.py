"""A BN layer that cannot be folded away, and why.

## What it does
Tries, on a copy of a model in evaluation mode (or one that is to be exported), what `batchnorm.fold` would do, and says
of every BN layer that would be left what stands in the way. Where ours can fold and torch's ``fuse_conv_bn_eval`` goes
wrong or refuses (grouped transposed convolutions, layers without gamma and beta; before an export also classes that
do more than BN), it says that, with the error.

## Why is this bad?
It is not wrong: a layer that stays costs a pass over memory at every inference. But who expects it to be gone wants to
know, and often the reason is an accident: a convolution that two BN layers share, an activation in between, a hook.

## Example
```python
nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1))
```

## Use instead
```python
nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
```

## Fix safety
No automatic fix: it would be another network.

## References
- pytorch/pytorch#104593
- pytorch/pytorch#197539
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.graph import trace
from batchnorm.preserve import in_mode
from batchnorm.records import Finding
from batchnorm.transforms.affine import CONVOLUTIONS, LINEAR, TRANSPOSED, is_norm, is_plain
from batchnorm.transforms.fold import _Folding

ERROR = 1e-3  # of the largest number: what is more is not rounding


def look(subject: Subject) -> Iterator[Finding]:
    """Fold a copy as far as it goes; say what is left, and what only ours could do."""
    model = subject.net
    norms = {path: m for path, m in model.named_modules() if is_norm(m) and (subject.purpose or not m.training)}
    if not norms:
        return
    copied = in_mode(copy.deepcopy(model), False)
    work = _Folding(copied, trace(copied, subject.example, forward=subject._forward, opaque=_one_call), clone=True)
    work.run(frozenset())
    for path, reason in work.left.items():
        if path in norms and work.graph.of(path):
            yield RULE.found(path, f"it cannot be folded: {reason}", _repair(reason), reason=reason)
    modules = dict(model.named_modules())
    for change in work.changes:
        into = str(change.after).removeprefix("into ").removesuffix(" (before it)")
        layer = modules.get(into)
        if change.path not in norms or layer is None or not str(change.after).endswith("(before it)"):
            continue
        # Do not report a user's own class with an activation inside unless torch's functions will be used on it.
        if subject.purpose or type(norms[change.path]).__module__.startswith("torch.nn"):
            wrong = _torchs(layer, norms[change.path])
            if wrong:
                yield RULE.found(
                    change.path, f"bn.fold can fold it into {into}, torch's own functions cannot: {wrong}",
                    "bn.fold(model, example), which compares what comes out", into=into,
                )  # fmt: skip


def _one_call(module: nn.Module) -> bool:
    return is_norm(module) or is_plain(module)


def _repair(reason: str) -> str:
    if "shares its weight" in reason or "times" in reason:
        return "one copy of the layer for each place that calls it"
    if "hooks" in reason:
        return "remove the hooks before folding"
    if "no running statistics" in reason:
        return "track_running_stats=True, and bn.calibrate(model, batches)"
    return "put the normalisation right behind a convolution or a linear layer, or leave it"


def _torchs(layer: Any, norm: Any) -> str:
    """What torch's own fusion makes of a pair that ours can fold; nothing if it does well."""
    try:
        pair = copy.deepcopy((layer, norm))
        linear, batch = (m.double().eval() for m in pair)
        x = _input_of(layer)
        with torch.no_grad():
            expected = batch(linear(x))
            if isinstance(layer, LINEAR):
                fused = fuse_linear_bn_eval(linear, batch)
            else:
                fused = fuse_conv_bn_eval(linear, batch, transpose=isinstance(layer, TRANSPOSED))
            off = float((fused(x) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0][:120]
        return f"{type(error).__name__}: {message}".rstrip(": ")
    return f"the result is off by {off:.2g} of the largest output" if not off <= ERROR else ""


def _input_of(layer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, LINEAR):
        return torch.randn(4, layer.in_features, generator=generator, dtype=torch.float64)
    assert isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED))
    sizes = [2 + d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    return torch.randn(2, layer.in_channels, *sizes, generator=generator, dtype=torch.float64)


RULE = Rule("BN502", "unfoldable", "advice", __doc__, look, ("model", "example"))
