"""Channels that carry nothing: a gamma of about zero, or an input that never varies.

## What it does
Counts, in a model or a checkpoint, the channels whose gamma is below a thousandth of the layer's largest, and those
whose running variance is next to nothing: a hundredth of eps, and a ten-thousandth of what the layer's others have.

## Why is this bad?
A channel with gamma zero gives its beta whatever it is given; one whose input is constant gives a constant too. They
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
None: pruning changes shapes. Gamma is not looked at before the layer has trained for 100 batches: residual networks
begin with a gamma of zero on purpose (``zero_init_residual``), so that each block is the identity at first; others draw
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
from batchnorm.records import Finding

GAMMA, VARIANCE = 1e-3, 1e-4  # of the layer's largest gamma; of its variances but for the largest tenth
OF_EPS = 1e-2  # such an input is divided by the root of eps, and stays next to nothing
YOUNG = 100  # batches, before which gamma is what it was set to


def look(subject: Subject) -> Iterator[Finding]:
    """Compare every channel with its layer."""
    for norm in subject.norms:
        yield from _of(norm)


def _of(norm: Norm) -> Iterator[Finding]:
    size = _channels(norm)
    # A gamma that was drawn at random, or set to zero, says nothing before it has learnt.
    faded = None if _young(norm) else _faded(norm.weight)
    constant = _constant(norm.running_var, norm.eps)
    if faded is not None and norm.weight is not None and not bool(norm.weight.any()):
        yield RULE.found(
            norm.path,
            f"its gamma is zero in all {size} channels, after {_batches(norm)} batches: it gives its beta "
            "whatever it is given",
            "see whether gamma learns (requires_grad, the optimiser's parameters)",
            channels=size, dead=size, gamma_zero=size,
        )  # fmt: skip
        return
    counts = [0 if mask is None else int(mask.sum()) for mask in (faded, constant)]
    if not any(counts) or size == 0:
        return
    either = _union([mask for mask in (faded, constant) if mask is not None])
    dead = int(either.sum())
    words = [
        f"{n} {'has' if n == 1 else 'have'} {what}"
        for n, what in zip(counts, ("a gamma of about zero", "an input that hardly varies"), strict=True)
        if n
    ]
    yield RULE.found(
        norm.path,
        f"{dead} of its {size} channels {'carries' if dead == 1 else 'carry'} nothing: {' and '.join(words)}",
        "prune them, if they are many; see BN102 for weight decay on gamma",
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
    return size <= GAMMA * size.max()


def _constant(var: Tensor | None, eps: float) -> Tensor | None:
    """Channels without variance, at every step if there are statistics for every step."""
    if var is None or var.is_meta or var.dim() not in (1, 2) or var.shape[-1] < 2:
        return None
    values = var.detach().double()
    values = values if values.dim() == 1 else values.amax(0)
    return (values <= VARIANCE * values.quantile(0.9)) & (values <= OF_EPS * eps)


def _batches(norm: Norm) -> int:
    count = norm.num_batches_tracked
    return 0 if count is None or count.is_meta else int(count.max())


def _young(norm: Norm) -> bool:
    whole = norm.weight is not None and not norm.weight.is_meta and not bool(norm.weight.any())
    return whole if norm.num_batches_tracked is None else _batches(norm) < YOUNG


RULE = Rule("BN113", "dead-channel", "advice", __doc__, look, ("tensors",))
