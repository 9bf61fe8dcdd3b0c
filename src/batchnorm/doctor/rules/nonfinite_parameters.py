"""Parameters that are NaN or infinite: gamma, beta or weights that training has destroyed.

## What it does
Counts, in a model or a checkpoint, the NaN and infinite values of every module's parameters, BN layers or not. Masks
(tensors of nothing but zeros and infinities that are neither weights nor biases) are left out, as are the running
statistics, which have a rule of their own (BN203).

## Why is this bad?
Whatever passes through the module is NaN, in training and in evaluation, and so is every gradient. One step with an
infinite loss is enough: the optimiser writes NaN into all parameters, and into its own state. Gamma and beta are often
the first. No transform recovers the values.

## Example
```python
loss = (prediction / target).mean()  # a target of zero: an infinite loss, NaN gradients
loss.backward()
optimizer.step()
```

## Use instead
```python
nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # raises before the step
```

## Fix safety
No automatic fix: load a checkpoint from before.

## References
- PyTorch's documentation of `torch.nn.utils.clip_grad_norm_` (error_if_nonfinite)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from batchnorm.doctor.finite import is_mask, not_finite
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.records import Finding

AFFINE = ("weight", "bias")  # buffers in frozen layers
REPAIR = "load a checkpoint from before, and reset the optimiser's state"


def look(subject: Subject) -> Iterator[Finding]:
    """Count the values of every module's own parameters."""
    norms = {norm.path for norm in subject.norms}
    for path, tensors in _by_module(subject).items():
        counts = {name: not_finite(tensor) for name, tensor in tensors.items()}
        bad = {
            name: count
            for name, count in counts.items()
            if any(count) and (name in AFFINE or not is_mask(tensors[name]))
        }
        if not bad:
            continue
        names = {"weight": "gamma", "bias": "beta"} if path in norms else {}
        words = [
            f"its {names.get(name, name)} has {_words(count.nan, count.infinite)} of {tensors[name].numel()}"
            for name, count in bad.items()
        ]
        yield RULE.found(
            path,
            f"{' and '.join(words)}: {'its channels' if path in norms else 'what it computes'} cannot be finite",
            REPAIR,
            tensors=list(bad),
            nan=sum(count.nan for count in bad.values()),
            infinite=sum(count.infinite for count in bad.values()),
            of=sum(tensors[name].numel() for name in bad),
        )


def _by_module(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """The parameters by the path of their module; in a checkpoint, all tensors but running statistics."""
    found: dict[str, dict[str, Tensor]] = {}
    if subject.model is not None:
        seen: set[int] = set()
        for path, module in subject.model.named_modules():
            buffers = {name: module._buffers.get(name) for name in AFFINE}
            tensors = {**buffers, **module._parameters}
            own = {name: t for name, t in tensors.items() if t is not None and id(t) not in seen}
            seen.update(map(id, own.values()))
            if own:
                found[path] = own
        return found
    for key, tensor in (subject.state or {}).items():
        path, _, name = key.rpartition(".")
        if not name.startswith("running_"):
            found.setdefault(path, {})[name] = tensor
    return found


def _words(nan: int, infinite: int) -> str:
    """Say how many of which.

    >>> _words(2, 1), _words(1, 0)
    ('2 NaN and 1 infinite values', '1 NaN value')
    """
    parts = [f"{n} {what}" for n, what in ((nan, "NaN"), (infinite, "infinite")) if n]
    return f"{' and '.join(parts)} value{'s' if nan + infinite > 1 else ''}"


RULE = Rule("BN208", "nonfinite-parameters", "error", __doc__, look, ("tensors",))
