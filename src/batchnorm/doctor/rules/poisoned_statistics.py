"""Running statistics that are NaN, infinite or negative: every evaluation from now on is lost.

## What it does
Counts, in a model or a checkpoint, the channels whose running mean or variance is not finite, or whose variance is
negative even with eps added, so that its root is NaN. (A variance between minus eps and zero amplifies: see BN209.)
While training runs, it names the step and the call in which that happened, the layer that was first, and the cause: the
batch, a parameter that was not finite already, or an overflow inside.

A check also inspects the example and the data: NaN and infinite values that reach a BN layer or the outputs poison the
statistics in training, and a check on nothing but such values has measured nothing. Values that the model takes care of
(a missing one, a mask of minus infinity) are not reported, nor is a place that is not finite for other inputs either.

## Why is this bad?
One bad batch is enough: a running average never forgets a NaN. Training may go on and look well (it uses the batch's
own statistics), and every evaluation gives NaN, or zeros where a variance is infinite. Torch's layers take such a batch
in; ours reject its statistics, and say so.

## Example
```python
x = (image - image.mean()) / image.std()  # an all-black image: 0 / 0
model(x)
```

## Use instead
```python
model = nn.Sequential(nn.Conv2d(3, 64, 3), bn.BatchNorm2d(64))  # a batch that is not finite is not learned from
```

## Fix safety
Unsafe: the poisoned layers are reset and measured on the given data (`batchnorm.calibrate`); the others keep theirs. If
parameters are not finite either (BN208), only an older checkpoint helps.

## References
- pytorch/pytorch#1206
- facebookresearch/SparseConvNet#190
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.finite import is_mask, not_finite
from batchnorm.doctor.remeasure import remeasure
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import in_mode
from batchnorm.records import Finding

DATA = "look at how the data are made (0 / 0, the logarithm of 0, a missing value), and leave such samples out"
LOOKS = 3  # batches that are not finite, of which one is looked for that the model does not take care of
REPAIR = "bn.calibrate(model, batches) after resetting the layer; bn.BatchNorm1d/2d/3d never learn from such a batch"


def look(subject: Subject) -> Iterator[Finding]:
    """Count values that are not finite, and negative variances."""
    bad = _bad_parameters(subject)
    for norm in subject.norms:
        counts = _counts(norm.running_mean, norm.running_var, norm.eps)
        if not any(counts.values()):
            continue
        lost = f"; {bad} values of parameters are not finite either" if bad else ""
        yield RULE.found(
            norm.path,
            f"{_words(counts)}{lost}",
            "load an older checkpoint: calibration cannot bring parameters back" if bad else REPAIR,
            fix="none" if bad else None,
            bad_parameters=bad,
            **counts,
        )
    if subject.model is not None:
        yield from _spoiled_data(subject)


def _spoiled_data(subject: Subject) -> Iterator[Finding]:
    """Find batches, and an example, that are not finite, if the model does not take care of them itself."""
    inputs = [subject._input(batch) for batch in subject.batches]
    if subject.example is not None and not any(subject.example is given for given in inputs):
        wrong, total = _not_finite(subject.example)
        place = _reached(subject, subject.example) if wrong else ""
        if place:
            yield RULE.found(
                "",
                f"the example has {wrong} NaN or infinite values of {total}, and they reach {place}: "
                "measurements on it are invalid",
                DATA,
                fix="none", values=wrong, of=total, reaches=place,
            )  # fmt: skip
    counts = [_not_finite(given) for given in inputs]
    bad = [number for number, (wrong, _) in enumerate(counts) if wrong]
    place = next(filter(None, (_reached(subject, inputs[number]) for number in bad[:LOOKS])), "")
    if not place:
        return
    wrong, total = counts[bad[0]]
    every = len(bad) == len(inputs)
    ours = bool(subject.layers) and all(isinstance(layer, _BatchNormBase) for _, layer in subject.layers)
    which = f"all {len(inputs)} batches" if every else f"{len(bad)} of {len(inputs)} batches"
    harm = (
        "measurements on them are invalid" if every
        else "our layers do not update from them" if ours
        else "one is enough to poison the running statistics in training"
    )  # fmt: skip
    yield RULE.found(
        "",
        f"{which if len(inputs) > 1 else 'the batch'} of the data {'have' if len(bad) > 1 else 'has'} NaN or "
        f"infinite values (batch {bad[0] + 1}: {wrong} of {total}), and they reach {place}: {harm}",
        DATA,
        severity="warning" if ours and not every else None,
        fix="none", batches=len(bad), of_batches=len(inputs), first=bad[0] + 1, values=wrong, of=total, reaches=place,
    )  # fmt: skip


def _not_finite(given: Any) -> tuple[int, int]:
    """How many values are not finite, and of how many."""
    real = [t for t in tensors_in(given) if t.dtype.is_floating_point and t.element_size() > 1]
    real = [t for t in real if t.layout is torch.strided and not t.is_meta and not t.is_nested]
    return sum(int((~t.isfinite()).sum()) for t in real), sum(t.numel() for t in real)


def _reached(subject: Subject, given: Any) -> str:
    """The first BN layer, or else the outputs, that such values reach; nothing if the model keeps them out.

    Neither does it count where the same input with zeros in their place is not finite: parameters do that (BN208).
    """
    clean = fresh(given, lambda t: t.nan_to_num(0.0, 0.0, 0.0) if t.dtype.is_floating_point else t.clone())
    known = _places(subject, clean)
    return next((place for place in _places(subject, given) if place not in known), "")


def _places(subject: Subject, given: Any) -> list[str]:
    """The BN layers whose inputs are not finite, in the order of their calls; "the outputs" at last."""
    reached: list[str] = []

    def look(path: str, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        if _not_finite(arguments)[0]:
            reached.append(path or "the model")

    with subject.looking(look, lambda module: isinstance(module, _BatchNorm)) as model:
        outputs = subject.run(in_mode(model, False), given)
    return [*reached, *(["the outputs"] if _not_finite(outputs)[0] else [])]


def _counts(mean: Tensor | None, var: Tensor | None, eps: float) -> dict[str, Any]:
    """How many channels are bad, in which way."""
    found: dict[str, Any] = {}
    for name, values in (("mean", mean), ("variance", var)):
        if values is None or values.is_meta:
            continue
        found[f"{name}_nan"] = int(values.isnan().sum())
        found[f"{name}_infinite"] = int(values.isinf().sum())
        if name == "variance":
            found["variance_negative"] = int((values.double() + eps <= 0).sum()) - int((values == -torch.inf).sum())
    return found


def _words(counts: Mapping[str, Any]) -> str:
    parts = {
        statistic: [f"{n} {kind.replace('nan', 'NaN')}" for kind in ("nan", "infinite", "negative")
                    if (n := counts.get(f"{statistic}_{kind}", 0))]
        for statistic in ("mean", "variance")
    }  # fmt: skip
    return " and ".join(
        f"its running {statistic} has {', '.join(bad)} value{'s' * (bad != ['1 ' + bad[0][2:]])}"
        for statistic, bad in parts.items()
        if bad
    )


def _bad_parameters(subject: Subject) -> int:
    if subject.model is not None:
        tensors: list[Tensor] = list(subject.model.parameters())
    else:
        tensors = [t for key, t in (subject.state or {}).items() if "running_" not in key]
    return sum(sum(bad) for tensor in tensors if any(bad := not_finite(tensor)) and not is_mask(tensor))


class _Watcher(Watcher):
    """After every call, one look at all buffers that moved in it; the details are found out when it is too late."""

    def __init__(self) -> None:
        self.order: dict[str, _BatchNorm] = {}  # the layers of this call, in order
        self.given: list[Tensor] = []
        self.known: set[str] | None = None

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[Finding]:
        self.order, self.given = {}, tensors_in(*arguments, *keywords.values())
        if self.known is None:
            self.known = {path for path, layer in run.layers.items() if not _all_finite([layer])}
            for path in self.known:
                layer = run.layers[path]
                counts = _counts(layer.running_mean, layer.running_var, layer.eps)
                words = f"{_words(counts)}, from before the run began"
                yield RULE.found(path, words, REPAIR, step=run.step, call=run.call, **counts)

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if seen.updates and seen.path not in (self.known or ()):
            self.order.setdefault(seen.path, seen.layer)
        return iter(())

    def on_return(self, run: TrainingRun, output: Any) -> Iterator[Finding]:
        order, given = self.order, self.given
        self.order, self.given = {}, []
        if order and not _all_finite(order.values()):
            bad = [path for path, layer in order.items() if not _all_finite([layer])]
            self.known = {*(self.known or ()), *bad}
            wrong = sum(int((~t.isfinite()).sum()) for t in given if t.dtype.is_floating_point)
            parameters = sum(int((~p.isfinite()).sum()) for p in run.model.parameters())
            cause = (
                f"the batch had {wrong} non-finite value{'s' * (wrong != 1)}" if wrong
                else f"the batch was finite, {parameters} of the parameters' values were not" if parameters
                else "batch and parameters were finite: it overflowed inside"
            )  # fmt: skip
            for path in bad:
                first = "it was the first layer" if path == bad[0] else f"{bad[0]} was the first"
                counts = _counts(order[path].running_mean, order[path].running_var, order[path].eps)
                yield RULE.found(
                    path,
                    f"{_words(counts)} since call {run.call} of the model: {cause}; {first}",
                    REPAIR,
                    step=run.step,
                    call=run.call,
                    bad_inputs=wrong,
                    bad_parameters=parameters,
                    first=bad[0],
                    **counts,
                )


def _all_finite(layers: Any) -> bool:
    buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]
    # A norm is not finite if a value is not; one call for all layers. float32 squares may overflow: then look closely.
    if not buffers or bool(torch.stack([n.double() for n in torch._foreach_norm(buffers, 1)]).isfinite().all()):
        return True
    return all(bool(b.isfinite().all()) for b in buffers)


RULE = Rule(
    "BN203", "poisoned-statistics", "error", __doc__, look, ("tensors",), watch=_Watcher, fix=remeasure,
    safety="unsafe", keeps=False,
)  # fmt: skip
