"""A model whose BN layers were folded away wrongly.

## What it does
Given the model as it was (``before=``), it finds the BN layers that are gone, and compares the outputs of both models
in evaluation mode. If they differ by more than rounding, it gives every layer that should have taken up a BN layer the
input it had before, and names those whose output is not what the BN layer made of it.

## Why is this bad?
Folding is arithmetic on weights whose axes differ from layer to layer: transposed and grouped convolutions, a linear
layer whose output is normalised along another axis, an eps or a bias that was forgotten. Nothing raises, and accuracy
falls by a little or by all of it.

## Example
```python
fused = fuse_conv_and_bn(transposed_convolution, norm)  # scales the inputs' axis instead of the outputs'
```

## Use instead
```python
folded, report = bn.fold(model, example)  # compares the outputs, and raises if they are not the same
```

## Fix safety
Unsafe: the model is replaced by `batchnorm.fold` of the one it came from; whatever else was done to it is lost.

## References
- ultralytics/ultralytics#25364 (outputs off by 2.71)
- pytorch/pytorch#184076
- pytorch/ao#4116
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.errors import BatchNormError
from batchnorm.graph import trace
from batchnorm.nested import tensors_in
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.affine import is_norm
from batchnorm.transforms.fold import fold
from batchnorm.transforms.outputs import TOLERANCE, difference

REPAIR = "bn.fold(the model before, example), which raises if the outputs differ"


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the outputs, then every layer that took up a BN layer, by itself."""
    model, before = subject.net, subject.before
    assert before is not None
    after = dict(model.named_modules())
    gone = [path for path, m in before.named_modules() if is_norm(m) and not is_norm(after.get(path, nn.Identity()))]
    if not gone:
        return
    old, new = subject.outputs_of(before), subject.outputs
    absolute = relative = 0.0
    allowed = max([TOLERANCE.get(t.dtype, 0.0) for t in [*model.parameters(), *before.parameters()]], default=0.0)
    for was, now in zip(old, new, strict=True):
        if [t.shape for t in was] != [t.shape for t in now]:
            absolute = relative = float("inf")
            continue
        largest, share = difference(was, now)
        absolute, relative = max(absolute, largest), max(relative, share)
    if relative <= allowed:
        return
    outputs = f"the outputs differ from the model's before by {absolute:.3g} ({relative:.2g} of the largest)"
    numbers: dict[str, Any] = {"outputs_absolute": absolute, "outputs_relative": relative, "allowed": allowed}
    wrong = [
        (path, norm, apart)
        for path, norm, apart in _layers(subject, before, after, gone)
        if apart > max(allowed, 1e-3 * relative)
    ]
    for path, norm, apart in wrong:
        far = "gives another shape" if math.isinf(apart) else f"is off by {apart:.2g} of the largest number"
        yield RULE.found(
            path,
            f"{norm} was folded into it wrongly: for the same input, it {far}; {outputs}",
            REPAIR,
            norm=norm,
            layer_relative=apart,
            **numbers,
        )
    if not wrong:
        yield RULE.found(
            "", f"{len(gone)} BN layers are gone, {gone[0]} first, and {outputs}", REPAIR, gone=gone, **numbers
        )


def _layers(
    subject: Subject, before: nn.Module, after: dict[str, nn.Module], gone: list[str]
) -> Iterator[tuple[str, str, float]]:
    """For every removed BN layer: the layer before it, and how far its output is from that of both together."""
    with untouched(before):
        graph = trace(in_mode(before, False), subject.example, forward=subject._forward)
    pairs: dict[str, str] = {}
    for norm in gone:
        calls = graph.of(norm)
        value = calls[0].arguments.get("0", calls[0].arguments.get("input")) if len(calls) == 1 else None
        made = None if value is None else graph.producer(value)
        if made is not None and made.kind == "module" and len(graph.of(made.name)) == 1 and made.name in after:
            pairs[made.name] = norm
    given: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    with untouched(before), torch.no_grad():
        modules = dict(in_mode(before, False).named_modules())
        for path, norm in pairs.items():
            modules[path].register_forward_hook(
                lambda m, args, y, path=path: given.__setitem__(path, args[0].clone()) if args else None  # type: ignore[misc]
            )
            modules[norm].register_forward_hook(
                lambda m, args, y, path=path: expected.__setitem__(path, y.clone())  # type: ignore[misc]
            )
        subject.run(before, subject.example)
    for path, norm in pairs.items():
        if path not in given or path not in expected:
            continue
        layer = after[path]
        with untouched(layer), torch.no_grad():
            got = tensors_in(layer.eval()(given[path]))
        wanted = expected[path]
        if len(got) != 1 or got[0].shape != wanted.shape:
            yield path, norm, float("inf")
            continue
        # What follows may have been fused as well.
        yield path, norm, min(difference([y], got)[1] for y in (wanted, wanted.relu()))


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Fold again, from the model before."""
    if repair.before is None:
        raise BatchNormError(f"repairing {RULE.code} needs the model before", where="fix", do="give check before=")
    repair.model, report = fold(repair.before, repair.need("example", RULE.code), forward=repair.forward)
    return Report((*(Change(f.path, "folded", "wrongly", "exactly") for f in findings), *report.changes))


RULE = Rule(
    "BN503", "wrong-fold", "error", __doc__, look, ("model", "before", "example"), fix=fix, safety="unsafe",
    keeps=False,
)  # fmt: skip
