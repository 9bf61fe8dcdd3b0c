"""A running variance of nearly zero under a channel that is alive: evaluation amplifies the channel by hundreds.

## What it does
Finds channels whose running variance is zero, slightly negative, or far too small for the input: with an example or
data it measures the variance of the layer's input, channel by channel. A channel is reported if the running variance
is below a hundredth, and normalising with it gives more than 30 standard deviations where it should give one, in at
least a quarter of the examples.

It is an error if the other channels of the layer fit their statistics. If they do not (a deviation off by a factor of
two, or a mean by half a deviation), the input may not resemble the training data: a filter that is dead on digits may
respond to random noise. Then it is a warning, and only advice if there is just an example. A channel whose input is as
constant as its variance says is dead, which is advice (BN113). Without an example, only a layer in which every channel
has a variance of nearly zero is reported, as a warning: either nothing varies in it, or its statistics are lost.

## Why is this bad?
Evaluation divides by the root of the running variance plus eps. With a variance of zero that is 0.003 for the usual
eps of 1e-5: the channel comes out 316 times too large for an input of variance one, and drowns the others. Training
uses the statistics of the batch and does not show it. It comes from statistics that were initialised with zeros, an
average of checkpoints that started at zero, an underflow in half precision, or blank batches in training.

## Example
```python
for name, buffer in ema.named_buffers():
    buffer.zero_()  # the average starts at zero, and is never corrected for that
```

## Use instead
```python
ema = copy.deepcopy(model)  # starts at the values of the model
model, calibrated = bn.calibrate(model, batches)  # if the statistics are lost
```

## Fix safety
Unsafe: the statistics of these layers are reset and measured on the data (`batchnorm.calibrate`); the others keep
theirs.

## References
- Ioffe & Szegedy (2015), Algorithm 2
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchnorm.doctor.remeasure import remeasure
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject
from batchnorm.doctor.variances import AMPLIFIED, EXAMPLES, InputVariances, is_tiny, measure, variance_of
from batchnorm.records import Finding

SMALL = 1e-2  # above, a running variance that is too small is stale (BN201)
FADED = 1e-3  # of the largest gamma: whatever such a channel is amplified by, nothing comes out of it
FITS, SHIFT = 2.0, 0.5  # a factor, and standard deviations: within them the input resembles the training data
REPAIR = "bn.calibrate(model, batches of the training data), or load the buffers of an intact checkpoint"


def look(subject: Subject) -> Iterator[Finding]:
    """Compare small running variances with the variance of the input."""
    suspects = {norm.path: (norm, small) for norm in subject.norms for small in [_small(norm)] if bool(small.any())}
    measured = measure(subject, [norm for norm, _ in suspects.values()])
    for path, (norm, small) in suspects.items():
        if path in measured:
            yield from _wrong(norm, small, measured[path], bool(subject.batches))
        elif bool(is_tiny(norm).all()) and len(small) > 1:
            largest = float(variance_of(norm).max())  # type: ignore[union-attr]
            yield RULE.found(
                path,
                f"its running variance is at most {largest:.2g} in all {len(small)} channels, negligible beside "
                f"its eps of {norm.eps:.2g}: either its input is constant, or the statistics are lost",
                f"give an example, which shows which of them it is; {REPAIR}",
                severity="warning", fix="none", channels=len(small), vanished=len(small), largest=largest, eps=norm.eps,
            )  # fmt: skip


def _small(norm: Norm) -> Tensor:
    """The channels whose variance is small and may be wrong, and that have an effect."""
    var = variance_of(norm)
    if var is None:
        return torch.zeros(0, dtype=torch.bool)
    small = (var < SMALL) & (var + norm.eps > 0)
    gamma = norm.weight
    if gamma is not None and not gamma.is_meta and gamma.shape == var.shape:
        size = gamma.detach().double().abs().to(var.device)
        small &= size > FADED * size.nan_to_num(posinf=0.0).max()
    return small


def _wrong(norm: Norm, small: Tensor, seen: InputVariances, with_data: bool) -> Iterator[Finding]:
    small = small.cpu()
    wrong = small & (seen.amplified >= AMPLIFIED) & (seen.alive >= EXAMPLES)
    count, channels = int(wrong.sum()), len(wrong)
    if not count:
        return
    usual = float(seen.amplified[~wrong].median()) if count < channels else 1.0
    shift = float(seen.shift[~wrong].median()) if count < channels else 0.0
    fits = 1 / FITS <= usual <= FITS and shift <= SHIFT
    var = variance_of(norm)
    assert var is not None
    worst = int(torch.where(wrong, seen.amplified, 0.0).argmax())
    doubt = (
        "" if fits
        else f"; but its other channels are off, too, by a factor of {usual:.2g} and {shift:.2g} deviations: what was "
        "given may not resemble the training data"
    )  # fmt: skip
    yield RULE.found(
        norm.path,
        f"the running variance of {count} of its {channels} channels is far too small: that of channel {worst} is "
        f"{float(var[worst]):.2g}, its input has {float(seen.variance[worst]):.2g}, and evaluation gives a deviation "
        f"of {float(seen.amplified[worst]):.3g} instead of 1{doubt}",
        REPAIR if fits else f"give real data (data=); {REPAIR}",
        severity="error" if fits else "warning" if with_data else "advice",
        channels=channels, vanished=count, channel=worst, running_variance=float(var[worst]),
        variance=float(seen.variance[worst]), amplified=float(seen.amplified[worst]), others_amplified=usual,
        others_shift=shift,
        which=[int(i) for i in wrong.nonzero().flatten()[:8]],
    )  # fmt: skip


RULE = Rule(
    "BN209", "vanished-variance", "error", __doc__, look, ("tensors",), fix=remeasure, safety="unsafe", keeps=False
)
