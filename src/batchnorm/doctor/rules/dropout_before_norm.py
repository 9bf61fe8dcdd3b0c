"""Dropout in front of BN: the variance that BN learns is not the one that evaluation has.

## What it does
Finds BN layers that dropout reaches with no other norm in between (a linear layer or a convolution may be), and
measures the variance of their input with dropout, as in training, and without, as in evaluation.

## Why is this bad?
Dropout keeps the mean and raises the variance: zeroing a share p and scaling the rest by 1 / (1 - p) makes the second
moment 1 / (1 - p) times as large. BN keeps that variance in its running statistics, and in evaluation, where nothing is
dropped, divides by too much. The shift adds up from layer to layer (Li et al. call it variance shift). Dropout behind
the last norm has no such effect.

## Example
```python
nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.BatchNorm1d(64))
```

## Use instead
```python
nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5))  # behind the last norm
```

## Fix safety
No automatic fix: where dropout goes is a matter of training. For a model that is trained already, `batchnorm.calibrate`
measures the statistics as evaluation has them, without dropout.

## References
- Li et al. (2019), Understanding the disharmony between dropout and batch normalization by variance shift
- luigibonati/mlcolvar#205
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from batchnorm.dataflow import Call, Graph
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.switches import no_update, uses
from batchnorm.records import Finding

SHIFT, LARGE = math.log(1.05), math.log(1.25)  # of the variance: worth a word; worth a warning
MOST = math.log(10.0)  # what a single channel counts at most
ERRORS = 4.0
MASKS = 3  # passes with dropout
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_NAMES = {function.__name__ for function in _DROPOUTS}


def look(subject: Subject) -> Iterator[Finding]:
    """Go from every dropout to the BN layers behind it, and measure what they are given with and without."""
    reached = _reached(subject.graph)
    layers = {
        layer: path for path, layer in subject.layers if layer in reached and uses(layer, training=True)[1]
    }  # fmt: skip
    if not layers:
        return
    on, off = _variances(subject, list(layers), MASKS, False), _variances(subject, list(layers), 1, True)
    for layer, path in layers.items():
        if layer not in on or layer not in off:
            continue
        (var_on, n), (var_off, m) = on[layer], off[layer]
        alive = var_off > 1e-12 * var_off.max()
        if not bool(alive.any()):
            continue
        # A channel that fires for a few values only with dropout, or without, must not outweigh the others.
        logs = (var_on[alive] / var_off[alive]).log().clamp(-MOST, MOST)
        shift = float(logs.mean())
        error = math.sqrt((2 / n + 2 / m) / len(logs))  # of a variance's logarithm, of n values: the root of 2 / n
        if abs(shift) > max(SHIFT, ERRORS * error):
            ratio = math.exp(shift)
            yield RULE.found(
                path,
                f"{reached[layer]} comes before it: with dropout, its input's variance is {ratio:.2f} times that of "
                f"evaluation, which it divides by {math.sqrt(ratio):.2f} times too much",
                "move dropout behind the last norm; of a trained model, bn.calibrate takes the shift out",
                severity="warning" if abs(shift) > LARGE else "advice",
                variance_ratio=ratio, masks=MASKS, values=n,
            )  # fmt: skip


def _reached(graph: Graph) -> dict[nn.Module, str]:
    """The BN layers that dropout reaches with no other norm in between, and which dropout it is."""
    found: dict[nn.Module, str] = {}
    for start in graph.calls:
        name = _dropout(start)
        if not name:
            continue
        waiting, seen = list(start.outputs), set(start.outputs)
        while waiting:
            for call in graph.consumers(waiting.pop()):
                if call.kind == "module" and isinstance(call.target, _BatchNorm):
                    found.setdefault(call.target, name)
                elif not _normalises(call):
                    new = [v for v in call.outputs if v not in seen]
                    seen.update(new)
                    waiting += new
    return found


def _dropout(call: Call) -> str:
    """A name for a call that drops; nothing for others. What a function drops shows in the measurement alone."""
    if call.kind == "module" and isinstance(call.target, _DropoutNd):
        return f"{call.name} ({type(call.target).__name__}, p = {call.target.p:g})" if call.target.p > 0 else ""
    if call.kind == "function" and call.name in _NAMES:
        return f"a {call.name} in {call.scope or 'the model'}"
    return ""


def _normalises(call: Call) -> bool:
    name = type(call.target).__name__ if call.kind == "module" else call.name
    return "norm" in name.lower()


class _NoDropout(TorchFunctionMode):
    """Dropout, of a module or a function, gives back what it is given."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def _variances(
    subject: Subject, layers: list[_BatchNorm], passes: int, without: bool
) -> dict[_BatchNorm, tuple[Tensor, int]]:
    """The variance by channel of what each layer is given in training mode, with dropout or without."""
    try:
        if subject.waits:
            raise ValueError("other ranks would have to take part")
        return _measured(subject, layers, passes, without, training=True)
    except ValueError:  # one value per channel somewhere: then norms as in evaluation, and dropout as in training
        return _measured(subject, layers, passes, without, training=False)


def _measured(
    subject: Subject, layers: list[_BatchNorm], passes: int, without: bool, training: bool
) -> dict[_BatchNorm, tuple[Tensor, int]]:
    seen: dict[_BatchNorm, list[Tensor]] = {}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].dim() > 1 and not given[0].is_meta:
            assert isinstance(module, _BatchNorm)
            x = given[0].double().transpose(0, 1).flatten(1)
            seen.setdefault(module, []).append(torch.stack([x.mean(1), x.square().mean(1), x.mean(1) * 0 + x.shape[1]]))

    wanted = set(layers)
    with subject.looking(note, lambda module: module in wanted) as model:
        model.train(training)
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.train()
            elif type(module).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d"):  # whole branches, by chance
                module.eval()
        for seed in range(passes):
            torch.manual_seed(seed)
            with no_update(model), _NoDropout() if without else nullcontext():
                for batch in subject.batches[:2]:
                    subject.run_batch(model, batch)
                if not subject.batches:
                    subject.run(model, subject.example)
    result = {}
    for layer, parts in seen.items():
        mean, square, count = torch.stack(parts).unbind(1)
        weights = count / count.sum(0)
        n = int(count.sum(0)[0])
        var = (weights * square).sum(0) - (weights * mean).sum(0).square()
        result[layer] = (var * n / max(n - 1, 1), n)
    return result


RULE = Rule("BN112", "dropout-before-norm", "warning", __doc__, look, ("model", "example"))
