"""Channels that carry nothing: a gamma of about zero, or an input that never varies.

## What it does
Counts, in a model or a checkpoint, the channels whose gamma is below a thousandth of the layer's largest, and those
whose running variance is next to nothing: a hundredth of eps, and a ten-thousandth of that of the layer's others. With
an example or data it measures whether the input of these channels really does not vary; one that varies is not dead,
its running variance is wrong (BN209). Without, it says only what the running variance is.

## Why is this bad?
The output of a channel with gamma zero is its beta; one whose input is constant gives a constant too. They
cost memory and time like the others. Weight decay on gamma makes such channels, so do filters whose ReLU died, or
whose input is constant. They can be pruned without changing the function, and are a sign when there are many.

## Example
```python
model.layer1[0].bn2.weight  # tensor([0.41, 1.2e-09, 0.33, 8.1e-10, ...])
```

## Use instead
Nothing, if they are few. Else prune them, take gamma out of the weight decay (BN102), or look at the learning
rate that killed them.

## Fix safety
None: pruning changes shapes. Gamma is not inspected before the layer has trained for 100 batches: residual networks
start with a gamma of zero on purpose (``zero_init_residual``), so that each block is the identity at first; others draw
gamma at random.

## References
- Goyal et al. (2017), section 5.1 (zero gamma on purpose)
- Liu et al. (2017), Learning efficient convolutional networks through network slimming
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject
from batchnorm.doctor.variances import OF_EPS, InputVariances, measure
from batchnorm.records import Finding

GAMMA, VARIANCE = 1e-3, 1e-4  # of the layer's largest gamma; of its variances but for the largest tenth
YOUNG = 100  # batches, before which gamma is what it was set to


def look(subject: Subject) -> Iterator[Finding]:
    """Compare every channel with its layer."""
    constant = {norm.path: _constant(norm.running_var, norm.eps) for norm in subject.norms}
    suspects = [norm for norm in subject.norms if (mask := constant[norm.path]) is not None and bool(mask.any())]
    inputs = measure(subject, suspects)
    for norm in subject.norms:
        yield from _of(norm, constant[norm.path], inputs.get(norm.path))


def _of(norm: Norm, constant: Tensor | None, seen: InputVariances | None) -> Iterator[Finding]:
    size = _channels(norm)
    # A gamma that was drawn at random, or set to zero, says nothing before it has learnt.
    faded = None if _young(norm) else _faded(norm.weight)
    if constant is not None and seen is not None:  # a channel that varies has a wrong variance instead (BN209)
        constant = constant.cpu() & (seen.variance <= OF_EPS * norm.eps)
    elif constant is not None and bool(constant.all()):  # a whole layer without variance is BN209's
        constant = None
    if faded is not None and norm.weight is not None and not bool(norm.weight.any()):
        yield RULE.found(
            norm.path,
            f"its gamma is zero in all {size} channels, after {_batches(norm)} batches: its "
            "output is its beta for every input",
                "check that gamma learns (requires_grad, the optimiser's parameters)",
            channels=size, dead=size, gamma_zero=size,
        )  # fmt: skip
        return
    counts = [0 if mask is None else int(mask.sum()) for mask in (faded, constant)]
    if not any(counts) or size == 0:
        return
    either = _union([mask for mask in (faded, constant) if mask is not None])
    dead = int(either.sum())
    reasons = ("a gamma of about zero", "an input that hardly varies" if seen else "a running variance of about zero")
    words = [f"{n} {'has' if n == 1 else 'have'} {what}" for n, what in zip(counts, reasons, strict=True) if n]
    sure = seen is not None or not counts[1]
    repair = "prune them, if they are many; see BN102 for weight decay on gamma"
    yield RULE.found(
        norm.path,
        f"{dead} of its {size} channels {'' if sure else 'seem to '}"
        f"{'carries' if dead == 1 and sure else 'carry'} nothing: {' and '.join(words)}",
        repair if sure else f"give an example, which shows whether their input varies; {repair}",
        channels=size, dead=dead, gamma_zero=counts[0], constant_input=counts[1],
        which=[int(i) for i in either.nonzero().flatten()[:8]],
    )  # fmt: skip


def _union(masks: list[Tensor]) -> Tensor:
    union = masks[0]
    for mask in masks[1:]:
        union = union | mask.to(union.device)
    return union


def _channels(norm: Norm) -> int:
    tensors = [t for t in (norm.weight, norm.running_var) if t is not None]
    return tensors[0].shape[-1] if tensors and tensors[0].dim() else 0


def _faded(gamma: Tensor | None) -> Tensor | None:
    if gamma is None or gamma.is_meta or gamma.dim() != 1 or len(gamma) < 2:
        return None
    size = gamma.detach().double().abs()
    return size <= GAMMA * size.nan_to_num(posinf=0.0).max()  # NaN and infinite ones are BN208's


def _constant(var: Tensor | None, eps: float) -> Tensor | None:
    """Channels without variance, at every step if there are statistics for every step."""
    if var is None or var.is_meta or var.dim() not in (1, 2) or var.shape[-1] < 2:
        return None
    values = var.detach().double()
    values = values if values.dim() == 1 else values.amax(0)
    known = values[values.isfinite()]
    if not len(known):
        return None
    # What is negative even with eps added gives NaN (BN203), not a constant.
    return (values <= VARIANCE * known.quantile(0.9)) & (values <= OF_EPS * eps) & (values + eps > 0)


def _batches(norm: Norm) -> int:
    count = norm.num_batches_tracked
    return 0 if count is None or count.is_meta else int(count.max())


def _young(norm: Norm) -> bool:
    whole = norm.weight is not None and not norm.weight.is_meta and not bool(norm.weight.any())
    return whole if norm.num_batches_tracked is None else _batches(norm) < YOUNG


RULE = Rule("BN113", "dead-channel", "advice", __doc__, look, ("tensors",))
