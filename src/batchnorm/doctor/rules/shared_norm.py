"""One BN layer fed from several places: its running statistics fit none of them.

## What it does
Finds BN layers that are called several times in one forward pass, and measures the moments of the input of each call:
by how many standard deviations the means differ, and by which factor the variances. It reports a layer only if the
difference is large (half a standard deviation, or a factor of two) and more than four times its sampling error. Two
augmented views of the same images, as in SimSiam or Barlow Twins, and two halves of one data set have one distribution
and are not reported. Channels that hardly ever vary count for little: a few examples do not determine their variance.

With fewer than four examples the sampling error is unknown. A large difference is then only advice to give more data.

## Why is this bad?
In training every call is normalised with its own batch; the running statistics take all of them in turn. If the calls
have different distributions (two domains, levels of a pyramid, steps in time, the sides of a siamese network
with different inputs), evaluation uses a mixture that is right for none of them.

## Example
```python
def forward(self, photo, sketch):
    return self.bn(self.conv_a(photo)), self.bn(self.conv_b(sketch))
```

## Use instead
```python
return self.bn_a(self.conv_a(photo)), self.bn_b(self.conv_b(sketch))
bn.DomainBatchNorm(64, domains=("photo", "sketch"))  # gamma and beta in common, statistics apart
```

## Fix safety
No automatic fix: which calls belong together is a decision about the model.

## References
- pytorch/pytorch#48929
- keras-team/keras#8794
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.layers.switches import use_batch_statistics, uses
from batchnorm.records import Finding

MEAN, VARIANCE = 0.5, math.log(2.0)  # standard deviations; natural logarithm of the ratio
ERRORS = 4.0  # standard errors of the measured difference
SAMPLES, CALLS, BATCHES = 4, 24, 4  # fewer samples give no sampling error; more calls or batches are not compared
MOST = 10.0  # standard deviations, or a factor: what a single channel counts at most
UNSURE = 0.6  # a variance with a larger relative error is not compared: a few rare values make it
FLOOR = 0.1  # error below which channels have the same weight


def look(subject: Subject) -> Iterator[Finding]:
    """Count the calls, then compare their inputs."""
    shared = {
        layer: path
        for path, layer in subject.layers
        if len(subject.graph.of(layer)) > 1
        and uses(layer, training=True)[1]
        and layer.running_mean is not None
        and layer.running_mean.dim() == 1
    }
    if not shared:
        return
    unsure: list[tuple[str, int, _Gap]] = []
    for layer, sites in _sites(subject, list(shared)).items():
        path, calls = shared[layer], len(subject.graph.of(layer))
        gap = _furthest(sites[:CALLS])
        if gap.certain:
            yield RULE.found(
                path,
                f"it is called {calls} times in a pass, on different distributions: means up to {gap.mean:.2g} "
                f"standard deviations apart, variances by a factor of {math.exp(gap.variance):.2g}",
                "one BN layer for each place, or bn.DomainBatchNorm, which keeps the statistics apart",
                calls=calls, mean_apart=gap.mean, variance_ratio=math.exp(gap.variance), samples=gap.samples,
            )  # fmt: skip
        elif gap.large and gap.samples < SAMPLES:
            unsure.append((path, calls, gap))
    if unsure:  # one finding for a whole encoder that is called twice
        path, calls, gap = unsure[0]
        rest = len(unsure) - 1
        more = f" (as {'are' if rest > 1 else 'is'} {rest} more layer{'s' if rest > 1 else ''})" if rest else ""
        yield RULE.found(
            path,
            f"it is called {calls} times in a pass{more}; here the means differ by up to {gap.mean:.2g} standard "
            f"deviations, but {gap.samples} example{'s are' if gap.samples > 1 else ' is'} too few to tell whether the "
            "distributions differ",
            f"give at least {SAMPLES} examples, better some batches (data=)",
            severity="advice", calls=calls, mean_apart=gap.mean, variance_ratio=math.exp(gap.variance),
            samples=gap.samples, layers=len(unsure),
        )  # fmt: skip


Site = tuple[Tensor, Tensor]  # of every sample: the means of its values and of their squares, by channel


def _sites(subject: Subject, layers: list[_BatchNorm]) -> dict[_BatchNorm, list[Site]]:
    """What each call of the layers is given, over the first batches, normalised as in training if that is possible."""
    runs: list[Callable[[nn.Module], Any]] = [partial(_run, subject, batch) for batch in subject.batches[:BATCHES]]
    runs = runs or [partial(subject.run, example=subject.example)]
    try:
        return _watched(subject, layers, runs, not subject.waits)
    except ValueError:  # one value per channel somewhere
        return _watched(subject, layers, runs, False)


def _run(subject: Subject, batch: Any, model: nn.Module) -> Any:
    return subject.run_batch(model, batch)


def _watched(
    subject: Subject, layers: list[_BatchNorm], runs: list[Any], training: bool
) -> dict[_BatchNorm, list[Site]]:
    seen: dict[_BatchNorm, list[list[Site]]] = {layer: [] for layer in layers}
    count: dict[_BatchNorm, int] = {}

    def note(path: str, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        assert isinstance(module, _BatchNorm)
        index = count[module] = count.get(module, -1) + 1
        if given and isinstance(given[0], Tensor) and given[0].dim() > 1 and not given[0].is_meta:
            x = given[0].double().flatten(2) if given[0].dim() > 2 else given[0].double().unsqueeze(2)
            if len(seen[module]) <= index:
                seen[module] += [[] for _ in range(index + 1 - len(seen[module]))]
            seen[module][index].append((x.mean(2), x.square().mean(2)))

    wanted = set(layers)
    with subject.looking(note, lambda module: module in wanted) as model:
        model.eval()
        for run in runs:
            count.clear()
            if training:
                with use_batch_statistics(model):
                    run(model)
            else:
                run(model)
    return {
        layer: [(torch.cat([m for m, _ in one]), torch.cat([s for _, s in one])) for one in calls if one]
        for layer, calls in seen.items()
    }


class _Gap(NamedTuple):
    mean: float  # standard deviations between the means, root mean square over channels
    variance: float  # natural logarithm of the ratio of the variances, likewise
    large: bool  # whether one of them matters
    certain: bool  # whether it is also more than the sampling error
    samples: int


def _furthest(sites: list[Site]) -> _Gap:
    """Compare all pairs of calls; return the gap of the pair that differs most."""
    moments = [_moments(*site) for site in sites]
    gaps = [_gap(a, b) for a, b in itertools.combinations(moments, 2)]
    return max(gaps, key=lambda g: (g.certain, g.large, g.mean / MEAN + g.variance / VARIANCE), default=_NONE)


_NONE = _Gap(0.0, 0.0, False, False, 0)


def _gap(one: _Moments, other: _Moments) -> _Gap:
    (n, mean, var, e_mean, e_var), (k, mean2, var2, e_mean2, e_var2) = one, other
    tiny = 1e-10 * float((var + var2).mean()) + 1e-30
    deviation = ((var + var2) / 2 + tiny).sqrt()
    apart = (mean - mean2) / deviation
    varies = (var + var2 > tiny) | (apart.abs() > MEAN)  # a channel that is constant in both calls says nothing
    off, off_error = _weighted(apart, e_mean.hypot(e_mean2) / deviation, varies)
    error, error2 = e_var / (var + tiny), e_var2 / (var2 + tiny)
    known = (torch.minimum(var, var2) > tiny) & (error <= UNSURE) & (error2 <= UNSURE)  # else the means decide
    ratio, ratio_error = _weighted(((var + tiny) / (var2 + tiny)).log(), error.hypot(error2), known, math.log(MOST))
    large = off > MEAN or ratio > VARIANCE
    certain = off > max(MEAN, ERRORS * off_error) or ratio > max(VARIANCE, ERRORS * ratio_error)
    return _Gap(off, ratio, large, min(n, k) >= SAMPLES and certain, min(n, k))


def _weighted(values: Tensor, errors: Tensor, use: Tensor, most: float = MOST) -> tuple[float, float]:
    """The root mean square of values over channels, and that of their errors; the exact ones weigh most."""
    values, errors = values[use].clamp(-most, most), errors[use].nan_to_num(posinf=most)
    if not len(values):
        return 0.0, 0.0
    weights = 1 / (errors.square() + FLOOR**2)
    weights = weights / weights.sum()
    return tuple(float((weights * t.square()).sum().sqrt()) for t in (values, errors))  # type: ignore[return-value]


_Moments = tuple[int, Tensor, Tensor, Tensor, Tensor]


def _moments(means: Tensor, squares: Tensor) -> _Moments:
    """The number of samples, their mean and variance by channel, and the standard errors of both."""
    n, mean = len(means), means.mean(0)
    spread = squares - 2 * mean * means + mean.square()  # of each sample, about the common mean
    unknown = torch.full_like(mean, math.inf)
    of_mean, of_var = ((t.std(0) if n > 1 else unknown) / math.sqrt(n) for t in (means, spread))
    return n, mean, spread.mean(0), of_mean, of_var


RULE = Rule("BN108", "shared-norm", "warning", __doc__, look, ("model", "example"))
