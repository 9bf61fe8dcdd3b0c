"""Running variances near zero, compared with those of the layer's inputs on the example or the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.subject import Norm, Subject
from batchnorm.functional import moments
from batchnorm.layers.switches import use_batch_statistics
from batchnorm.moments import Moments, merged
from batchnorm.nested import tensors_in
from batchnorm.preserve import in_mode

OF_EPS = 1e-2  # of eps: such an input is divided by the root of eps, and stays next to nothing
USUAL_EPS = 1e-3  # the largest that is usual: a larger one has a finding of its own (BN104)
AMPLIFIED = 30.0  # standard deviations: what evaluation makes of a channel whose running variance is wrong
CLEARLY = 10.0  # standard deviations that an example has to deviate by, for its channel to be alive in it
EXAMPLES = 0.25  # of all examples, in which a channel that is alive is
BATCHES = 4


@dataclass(frozen=True)
class InputVariances:
    """The variance of one BN layer's input, by channel."""

    variance: Tensor
    amplified: Tensor  # the standard deviation after normalising with the running variance; 1 if that is right
    shift: Tensor  # how far the running mean is off, in standard deviations of the input
    alive: Tensor  # the share of examples that clearly deviate from the channel's median, by that variance


def variance_of(norm: Norm) -> Tensor | None:
    """The running variance of a layer with one for all its inputs, in float64; None if there is none.

    >>> variance_of(Norm("bn1", None, None, torch.zeros(2), torch.ones(2), None))
    tensor([1., 1.], dtype=torch.float64)
    """
    var = norm.running_var
    return None if var is None or var.is_meta or var.dim() != 1 or not len(var) else var.detach().double()


def is_tiny(norm: Norm) -> Tensor:
    """The channels whose running variance is next to nothing beside eps, or at least does not reach zero with it.

    >>> is_tiny(Norm("bn1", None, None, torch.zeros(4), torch.tensor([1.0, 0.0, -1e-9, -1.0]), None))
    tensor([False,  True,  True, False])
    """
    var = variance_of(norm)
    assert var is not None
    return (var <= OF_EPS * min(norm.eps, USUAL_EPS)) & (var + norm.eps > 0)


def measure(subject: Subject, norms: Iterable[Norm]) -> dict[str, InputVariances]:
    """Measure the inputs of some layers over the first batches, or the example, by the path of the layer.

    The layers normalise with batch statistics, as in training, so that a wrong variance does not distort what comes
    after it. A layer is left out if it is not called or has one value per channel; all are if the inputs are constant.
    """
    layers = {norm.layer: norm for norm in norms if norm.layer is not None and variance_of(norm) is not None}
    inputs = [subject._input(batch) for batch in subject.batches[:BATCHES]] or [subject.example]
    if not layers or subject.example is None or not any(map(_varies, tensors_in(*inputs))):
        return {}
    seen: dict[Any, tuple[list[Moments], list[Tensor]]] = {layer: ([], []) for layer in layers}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].dim() > 1 and not given[0].is_meta:
            x = given[0].detach()
            if x.numel() > x.shape[1] and bool(x.isfinite().all()):
                assert isinstance(module, _BatchNorm)
                parts, alive = seen[module]
                part = Moments(*(t.cpu().double() for t in moments(x)))
                parts.append(part)
                alive.append(_alive(x, part.var, layers[module]))

    with subject.looking(note, lambda module: module in layers) as model:
        in_mode(model, False)
        for given in inputs:
            try:
                if subject.waits:
                    subject.run(model, given)
                else:
                    with use_batch_statistics(model):
                        subject.run(model, given)
            except ValueError:  # one value per channel somewhere
                continue
    found = {}
    for layer, (parts, alive) in seen.items():
        if parts:
            norm = layers[layer]
            _, mean, var = merged(Moments(*map(torch.stack, zip(*parts, strict=True))))
            running, running_mean = variance_of(norm), norm.running_mean
            assert running is not None
            assert running_mean is not None
            shift = (mean - running_mean.detach().double().cpu()).abs() / (var + norm.eps).sqrt()
            amplified = ((var + norm.eps) / (running.cpu() + norm.eps).clamp(min=1e-30)).sqrt()
            found[norm.path] = InputVariances(var, amplified, shift, torch.cat(alive).double().mean(0))
    return found


def _varies(given: Tensor) -> bool:
    return given.numel() > 1 and not given.is_meta and bool((given != given.flatten()[0]).any())


def _alive(x: Tensor, var: Tensor, norm: Norm) -> Tensor:
    """Whether the input of each example and channel deviates from the channel's median by far more than it should."""
    running = variance_of(norm)
    assert running is not None
    limit = CLEARLY**2 * (running.cpu() + norm.eps).clamp(min=1e-30)
    alive = torch.zeros(x.shape[:2], dtype=torch.bool)
    some = (var >= limit * EXAMPLES).nonzero().flatten()  # the median takes long, and the others do not reach it
    if len(some):
        values = x[:, some.to(x.device)].double().reshape(len(x), len(some), -1)  # (N, channels, positions)
        middle = values.transpose(0, 1).flatten(1).median(1).values
        alive[:, some] = (values - middle[:, None]).square().mean(2).cpu() >= limit[some]
    return alive
