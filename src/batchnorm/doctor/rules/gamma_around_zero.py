"""Gamma initialised around zero instead of one: every layer scales its channels down to next to nothing.

## What it does
Finds new BN layers in which gamma differs from channel to channel, has a mean of zero within the sampling error, and is
negative in about half of the channels, as after ``normal_(weight, 0, 0.02)`` on all parameters. Sound initialisations
are mostly positive (one, N(1, 0.02), uniform from 0 to 1, RepVGG's N(0.1, 0.1)) or all zero (``zero_init_residual``).
In a model or a checkpoint that was trained, gammas near zero of both signs may belong to residual branches that began
at zero; there it is reported only if at least two thirds of the layers have them and both signs cancel.

## Why is this bad?
BN exists to give the next layer inputs of variance one. A gamma of N(0, 0.02) makes that 0.0004, layer after layer:
nonlinearities see a constant, the gradient in front of the layer shrinks by the same factor, and the learning rate
that works elsewhere takes long to bring gamma to where it should have begun. DCGAN's ``weights_init`` draws
convolutions from N(0, 0.02), and gamma from N(1, 0.02).

## Example
```python
def init(module):
    if hasattr(module, "weight"):
        nn.init.normal_(module.weight, 0.0, 0.02)
```

## Use instead
```python
def init(module):
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
    elif hasattr(module, "weight"):
        nn.init.normal_(module.weight, 0.0, 0.02)
```

## Fix safety
Unsafe, and of layers that are new: one is added to gamma, which gives N(1, 0.02) where it was N(0, 0.02). For trained
layers there is no fix.

## References
- Radford, Metz & Chintala (2016), DCGAN
- transformers 5.22, `_init_weights` of MobileViT, EfficientNet and RT-DETR: N(0, 0.02)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject
from batchnorm.records import Change, Finding, Report

NEGATIVE, SEVERAL = 0.25, 3  # of the channels; and so many, unless gamma is near zero as a whole
ERRORS = 3.0  # standard errors of the mean
NEAR = 0.25  # of zero: all gammas
SHRINKS = 0.5  # root mean square: from here on the scale does no harm
MOST, CHANNELS = 2 / 3, 32  # of the layers of a trained model, and channels in all of them
CANCEL = 0.35  # the sum of the gammas, as a share of the sum of their sizes
DEAD = 1e-3  # root mean square: weight decay, not an initialisation (BN113)


def look(subject: Subject) -> Iterator[Finding]:
    """Judge new layers one by one, and the trained ones together."""
    gammas = {norm.path: gamma for norm in subject.norms if (gamma := _gamma(norm)) is not None}
    new = {norm.path for norm in subject.norms if _is_new(norm)}
    mixed = {path: gamma for path, gamma in gammas.items() if _is_mixed(gamma)}
    for path in [path for path in mixed if path in new]:
        yield _found(path, mixed[path], is_new=True)
    trained = [path for path in gammas if path not in new]
    wrong = [path for path in trained if path in mixed and DEAD < _rms(mixed[path]) < SHRINKS]
    if len(wrong) < 2 or len(wrong) < MOST * len(trained):
        return
    together = torch.cat([mixed[path] for path in wrong])
    if len(together) >= CHANNELS and float(together.sum().abs()) < CANCEL * float(together.abs().sum()):
        for path in wrong:
            yield _found(path, mixed[path], is_new=False)


def _gamma(norm: Norm) -> Tensor | None:
    """Gamma, if it differs between channels and is finite."""
    gamma = norm.weight
    if gamma is None or gamma.is_meta or gamma.dim() != 1 or len(gamma) < 2:
        return None
    values = gamma.detach().double().cpu()
    return values if bool(values.isfinite().all()) and bool((values != values[0]).any()) else None


def _is_new(norm: Norm) -> bool:
    count = norm.num_batches_tracked
    return norm.is_new and (count is None or count.is_meta or not bool(count.any()))


def _is_mixed(gamma: Tensor) -> bool:
    """Whether gammas are of both signs, and their mean is zero but for chance."""
    negative = int((gamma < 0).sum())
    many = negative >= SEVERAL or (negative > 0 and float(gamma.abs().max()) < NEAR)
    centred = float(gamma.mean().abs()) <= ERRORS * float(gamma.std()) / len(gamma) ** 0.5
    return many and centred and NEGATIVE <= negative / len(gamma) <= 1 - NEGATIVE


def _rms(gamma: Tensor) -> float:
    return float(gamma.square().mean().sqrt())


def _found(path: str, gamma: Tensor, is_new: bool) -> Finding:
    negative, size = int((gamma < 0).sum()), _rms(gamma)
    small = size < SHRINKS
    harm = f": it scales its channels to a deviation of {size:.2g} instead of 1" if small else ", instead of all near 1"
    return RULE.found(
        path,
        f"{'it is new and ' if is_new else ''}its gamma has a mean of {float(gamma.mean()):.2g}, with {negative} of "
        f"{len(gamma)} values negative{harm}",
        "initialise gamma with 1 (nn.init.ones_) or N(1, 0.02), and leave N(0, 0.02) to convolutions",
        severity="warning" if small else "advice",
        fix="unsafe" if is_new and small else "none",
        mean=float(gamma.mean()), rms=size, negative=negative, channels=len(gamma), new=is_new,
    )  # fmt: skip


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Add one to gamma, in place: optimisers keep it."""
    modules = dict(repair.model.named_modules(remove_duplicate=False))
    changes = []
    for path in dict.fromkeys(finding.path for finding in findings):
        gamma = modules[path].weight
        assert isinstance(gamma, Tensor)
        before = float(gamma.detach().mean())
        with torch.no_grad():
            gamma.add_(1.0)
        changes.append(Change(path, "gamma, mean", round(before, 4), round(before + 1.0, 4)))
    return Report(tuple(changes))


RULE = Rule("BN115", "gamma-around-zero", "warning", __doc__, look, ("tensors",), fix=fix, safety="unsafe", keeps=False)
