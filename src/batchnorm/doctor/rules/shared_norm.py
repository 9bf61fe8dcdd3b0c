"""One BN layer fed from several places: its running statistics fit none of them.

## What it does
Finds BN layers that are called several times in one forward pass, and measures the moments of what each call gives
them: by how many standard deviations the means are apart, and by which factor the variances.

## Why is this bad?
In training every call is normalised with its own batch; the running statistics take all of them in turn. If the calls
have different distributions (two domains, levels of a pyramid, steps in time, the sides of a siamese network
with different inputs), evaluation uses a mixture that is right for none of them. If the distributions are the same, all
is well, but for an average that moves several times a step.

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
None by machine: which calls belong together is for the model to say.

## References
- pytorch/pytorch#48929
- keras-team/keras#8794
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import uses
from batchnorm.doctor.subject import Subject
from batchnorm.layers.switches import use_batch_statistics
from batchnorm.records import Finding

MEAN, VARIANCE = 0.5, math.log(2.0)  # apart by so many deviations, or so much of the logarithm: different distributions
ERRORS = 4.0  # and by so many standard errors of what was seen
SAMPLES, CALLS, BATCHES = 4, 24, 4  # fewer samples say nothing; more calls or batches are not compared


def look(subject: Subject) -> Iterator[Finding]:
    """Count the calls, then compare what they give."""
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
    alike: list[tuple[str, int, float, float]] = []
    for layer, sites in _sites(subject, list(shared)).items():
        path, calls = shared[layer], len(subject.graph.of(layer))
        off, ratio, different = _furthest(sites[:CALLS])
        if not different:
            alike.append((path, calls, off, ratio))
            continue
        yield RULE.found(
            path,
            f"it is called {calls} times in a pass, on different distributions: means up to {off:.2g} standard "
            f"deviations apart, variances by a factor of {math.exp(ratio):.2g}",
            "one BN layer for each place, or bn.DomainBatchNorm, which keeps the statistics apart",
            calls=calls, mean_apart=off, variance_ratio=math.exp(ratio), samples=len(sites[0][0]) if sites else 0,
        )  # fmt: skip
    if alike:  # one sentence for a whole encoder that is called twice
        path, calls, off, ratio = alike[0]
        more = f" (as are {len(alike) - 1} more layers)" if len(alike) > 1 else ""
        yield RULE.found(
            path,
            f"it is called {calls} times in a pass{more}, on inputs that look alike here (means at most {off:.2g} "
            f"standard deviations apart): its running statistics move {calls} times a step",
            "nothing, if the calls have the same kind of input; else one BN layer for each place",
            severity="advice", calls=calls, mean_apart=off, variance_ratio=math.exp(ratio), layers=len(alike),
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


def _furthest(sites: list[Site]) -> tuple[float, float, bool]:
    """Of all pairs of calls: how far means and variances are apart at most, and whether that is more than chance."""
    moments = [_moments(*site) for site in sites]
    off = ratio = 0.0
    different = False
    for (n, mean, var, e_mean, e_var), (k, mean2, var2, e_mean2, e_var2) in itertools.combinations(moments, 2):
        tiny = 1e-12 * float((var + var2).mean()) + 1e-30
        pooled = (var + var2) / 2 + tiny
        d = _rms((mean - mean2) / pooled.sqrt())
        r = _rms(((var + tiny) / (var2 + tiny)).log())
        d_error = _rms((e_mean.square() + e_mean2.square()).sqrt() / pooled.sqrt())
        r_error = _rms(((e_var / (var + tiny)).square() + (e_var2 / (var2 + tiny)).square()).sqrt())
        enough = min(n, k) >= SAMPLES
        if enough and (d > max(MEAN, ERRORS * d_error) or r > max(VARIANCE, ERRORS * r_error)):
            different = True
        off, ratio = max(off, d), max(ratio, r)
    return off, min(ratio, 50.0), different


def _moments(means: Tensor, squares: Tensor) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """The number of samples, their mean and variance by channel, and the standard errors of both."""
    n, mean = len(means), means.mean(0)
    spread = squares - 2 * mean * means + mean.square()  # of each sample, about the common mean
    unknown = torch.full_like(mean, math.inf)
    of_mean, of_var = ((t.std(0) if n > 1 else unknown) / math.sqrt(n) for t in (means, spread))
    return n, mean, spread.mean(0), of_mean, of_var


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


RULE = Rule("BN108", "shared-norm", "warning", __doc__, look, ("model", "example"))
