"""BN over probabilities or class scores: what comes out is neither.

## What it does
Finds BN layers whose input is the result of a softmax (or of a log-softmax), with nothing but dropout and changes of
shape in between, and measures the range of the input and of the output. With labels it also finds BN layers that make
the model's class scores themselves, and compares how often the largest score is right with the probability that it is
given.

## Why is this bad?
Probabilities sum to one, so the channels depend on each other, and where there are many classes most are nearly zero.
BN shifts and scales each of them on its own: the result is negative in half of the places, sums to nothing in
particular, and depends on which other examples are in the batch. A loss that takes its logarithm is NaN; one that
applies a softmax itself sees scores that saturate in no direction.

As the last layer, BN gives the scores of every class the same mean and a deviation of gamma. A rare class gets as large
scores as a frequent one, and until gamma has grown, the model cannot be sure of anything.

## Example
```python
nn.Sequential(nn.Linear(64, 10), nn.Softmax(1), nn.BatchNorm1d(10))
```

## Use instead
```python
nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))  # scores
```

## Fix safety
No automatic fix: without the layer it is another network, which has to be trained.

## References
- Ioffe & Szegedy (2015), section 3.2 (BN before the nonlinearity)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from batchnorm.dataflow import Call, Graph
from batchnorm.doctor.gap import classify
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.switches import use_batch_statistics
from batchnorm.preserve import in_mode
from batchnorm.records import Finding

UNSURE = 0.2  # by which the mean probability of the largest score is below the share of examples where it is right
_SOFTMAX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_SOFTMAX_NAMES = {"softmax", "log_softmax", "softmin", "gumbel_softmax"}
_DIVISIONS = {"div", "true_divide", "__truediv__", "divide"}
_SAME = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd)
_SAME_NAMES = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
    "transpose", "permute", "movedim", "contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16",
    "view_as", "reshape_as", "type_as", "swapaxes", "swapdims", "moveaxis", "t", "adjoint", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip


def look(subject: Subject) -> Iterator[Finding]:
    """Follow the input of every BN layer back to a softmax, and the model's scores back to a BN layer."""
    behind = {
        layer: source
        for _, layer in subject.layers
        for call in subject.graph.of(layer)[:1]
        for source in [_back(subject.graph, call.inputs[0])]
        if source is not None and _is_softmax(subject.graph, source)
    }
    ranges = _ranges(subject, set(behind)) if behind else {}
    for path, layer in subject.layers:
        if layer in ranges:
            yield _behind_softmax(path, behind[layer], ranges[layer])
    if subject.labelled:
        yield from _last(subject, behind)


def _behind_softmax(path: str, source: Call, seen: tuple[Tensor, Tensor]) -> Finding:
    given, made = seen
    name = f"{source.name} ({type(source.target).__name__})" if source.kind == "module" else f"a {source.name}"
    name = "a softmax" if source.name in _DIVISIONS else name
    negative = float((made < 0).double().mean())
    low, high, mean = float(given.min()), float(given.max()), float(given.mean())
    return RULE.found(
        path,
        f"it normalises the output of {name}, from {low:.2g} to {high:.2g} with a mean of {mean:.2g}: its output "
        f"lies between {float(made.min()):.2g} and {float(made.max()):.2g}, {negative:.0%} of it below zero",
        "normalise in front of the linear layer that makes the scores, and leave the softmax to the loss",
        input_low=low, input_high=high, input_mean=mean, output_low=float(made.min()), output_high=float(made.max()),
        negative=negative,
    )  # fmt: skip


def _last(subject: Subject, behind: Any) -> Iterator[Finding]:
    """The BN layer that makes the class scores, if the model is less sure of them than it is right."""
    source = _back(subject.graph, subject.graph.outputs[0], through_softmax=True) if subject.graph.outputs else None
    layer = source.target if source is not None and source.kind == "module" else None
    if source is None or not isinstance(layer, _BatchNorm) or layer in behind or not classify(subject, subject.outputs):
        return
    right = subject.accuracy(subject.outputs)
    assert right is not None
    scores = torch.cat([given[0] for given in subject.outputs]).double()
    probable = (
        scores if bool((scores >= 0).all()) and float((scores.sum(1) - 1).abs().max()) < 1e-3 else scores.softmax(1)
    )
    sure = float(probable.amax(1).mean())
    if right - sure > UNSURE:
        yield RULE.found(
            next(path for path, module in subject.layers if module is layer),
            f"its output is the class scores: {right:.0%} of the largest are right, with mean probability {sure:.0%}",
            "end with the linear layer, and normalise in front of it",
            severity="advice", accuracy=right, probability=sure, classes=scores.shape[1],
        )  # fmt: skip


def _is_softmax(graph: Graph, call: Call) -> bool:
    if call.kind == "module":
        return isinstance(call.target, _SOFTMAX)
    return call.name in _SOFTMAX_NAMES or (call.name in _DIVISIONS and _is_share(graph, call))


def _is_share(graph: Graph, call: Call) -> bool:
    """Whether a division is a softmax that is written out: exponentials over their sum."""
    parts = [graph.producer(value) for value in call.inputs]
    if len(parts) != 2 or parts[0] is None or parts[1] is None or parts[1].name != "sum":
        return False
    summed = graph.producer(parts[1].inputs[0])
    return parts[0].name == "exp" and summed is not None and summed.name == "exp"


def _back(graph: Graph, value: int, through_softmax: bool = False) -> Call | None:
    """The call that computed a value, behind dropout and changes of shape; None for an input."""
    while True:
        call = graph.producer(value)
        if call is None:
            return None
        same = isinstance(call.target, _SAME) if call.kind == "module" else call.name in _SAME_NAMES
        if not call.inputs or not (same or (through_softmax and _is_softmax(graph, call))):
            return call
        value = call.inputs[0]


def _ranges(subject: Subject, wanted: set[Any]) -> dict[Any, tuple[Tensor, Tensor]]:
    """What layers are given and give for the example, normalised as in training if that is possible."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        tensors = given and isinstance(given[0], Tensor) and isinstance(result, Tensor)
        if tensors and given[0].numel() and not given[0].is_meta and bool(result.isfinite().all()):
            seen.setdefault(module, (given[0].detach().double().clone(), result.detach().double().clone()))

    with subject.looking(note, lambda module: module in wanted) as model:
        in_mode(model, False)
        try:
            if subject.waits:
                raise ValueError("other ranks would have to take part")
            with use_batch_statistics(model):
                subject.run(model, subject.example)
        except ValueError:  # one value per channel somewhere
            seen.clear()
            subject.run(model, subject.example)
    return seen


RULE = Rule("BN114", "norm-on-scores", "warning", __doc__, look, ("model", "example"))
