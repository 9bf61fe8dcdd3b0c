"""A copy of the model (averaged, target, teacher) that follows its parameters, but not its running statistics.

## What it does
Compares every copy given to the monitor (``copies={"ema": averaged}``) with what it was at the beginning and
with the model: its parameters have moved, its running statistics have not, and the model's are elsewhere by now. Found
when such a copy is called with running statistics; if it never is, at the end, as advice.

A copy inside the model that is monitored (a target encoder beside the one that learns, or
``bn.monitor({"student": student, "teacher": teacher})``) is found by itself: it is of the same make, and its parameters
have no gradients. Any other has to be named, ``bn.monitor(model, optimizer, copies={"ema": averaged})``: what
``copy.deepcopy`` makes is an object of its own, and nothing in it says whom it follows. A copy may be one of the whole
model or of a part, such as the generator in ``bn.monitor({"G": generator, "D": discriminator}, copies={"ema": ...})``.

A stochastic weight average (`torch.optim.swa_utils.AveragedModel` without ``avg_fn``, ``multi_avg_fn`` and
``use_buffers``) has the statistics of the last model that went into it, not those of the average: it is found when it
is called for evaluation after two or more updates, unless it has seen data in training mode since (``update_bn``). What
the statistics of a copy do to its outputs, ``bn.check(averaged.eval(), data=batches)`` measures (BN201).

## Why is this bad?
An average over ``model.parameters()`` leaves out buffers. Evaluated, the copy normalises the activations of new weights
by the statistics of the first ones (0 and 1 if it was made before training), and is worse than the model that it is to
smooth.

## Example
```python
averaged = copy.deepcopy(model).eval()
for p, q in zip(averaged.parameters(), model.parameters()):
    p.lerp_(q, 0.01)
```

## Use instead
```python
averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # copies buffers
```
Or measure its own, once, before it is used: ``averaged, _ = bn.calibrate(averaged, batches)``, or
``torch.optim.swa_utils.update_bn(batches, averaged)``.

## Fix safety
Unsafe: ``bn.fix(averaged, run.findings, data=batches, unsafe=True)`` calibrates the copy that it is given, which
changes what it computes; the data must be that of training.

## References
- pytorch/ignite#2590 (F1 about 40 instead of 60)
- pytorch/pytorch#84053
- CuriousAI/mean-teacher#9
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.layers.switches import uses
from batchnorm.moments import distance
from batchnorm.records import Finding, Report
from batchnorm.transforms.calibrate import calibrate

FEW = 1000  # values of each parameter that are remembered
MEAN, LOG_VARIANCE = 0.1, 0.2  # the model's statistics are farther away than this


@dataclass
class _CopiedLayer:
    path: str
    copied: _BatchNorm
    of_model: _BatchNorm
    mean: Tensor
    var: Tensor

    def apart(self) -> tuple[float, float]:
        """How far the statistics are from the model's, if they have not moved since; else nothing."""
        mean, var, theirs = self.copied.running_mean, self.copied.running_var, self.of_model
        if mean is None or var is None or theirs.running_mean is None or theirs.running_var is None:
            return 0.0, 0.0
        if uses(self.copied)[0] or not (torch.equal(mean, self.mean) and torch.equal(var, self.var)):
            return 0.0, 0.0
        here = theirs.running_mean.to(mean).double(), theirs.running_var.to(var).double()
        away, factor = distance(*here, mean.double(), var.double(), self.copied.eps)
        return float(away), float(factor)


class _Watcher(Watcher):
    def __init__(self) -> None:
        self.layers: dict[str, list[_CopiedLayer]] = {}
        self.parameters: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.looked: dict[str, int] = {}
        self.found: set[str] = set()
        self.inside: dict[str, str] = {}  # the BN layers of copies that are parts of the model, and whose they are
        self.measured: dict[str, int] = {}  # after how many updates of an average its statistics were

    def on_begin(self, run: TrainingRun) -> Iterator[Finding]:
        for name, copied in run.copies.items():
            self._remember(name, copied, counterparts(copied, run.model, name))
        paths = {layer: path for path, layer in run.layers.items()}
        for name, (follower, learner) in twins(run.model).items():
            own = {_plain(path): m for path, m in learner.named_modules() if isinstance(m, _BatchNorm)}
            self._remember(name, follower, own)
            self.inside |= {paths[layer.copied]: name for layer in self.layers[name]}
        yield from ()

    def _remember(self, name: str, copied: nn.Module, of_model: dict[str, _BatchNorm]) -> None:
        self.layers[name] = [
            _CopiedLayer(path, m, of_model[_plain(path)], m.running_mean.clone(), m.running_var.clone())
            for path, m in copied.named_modules()
            if isinstance(m, _BatchNorm) and _plain(path) in of_model and m is not of_model[_plain(path)]
            if m.running_mean is not None and m.running_var is not None
        ]
        self.parameters[name] = [(p, _few(p)) for p in copied.parameters()]

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        name = self.inside.get(seen.path)
        if name is not None and not seen.from_batch:
            yield from self._called(run, name)

    def on_copy(self, run: TrainingRun, name: str) -> Iterator[Finding]:
        copied = run.copies[name]
        if _is_plain_average(copied):
            yield from self._judge_average(run, name, copied)
        yield from self._called(run, name)

    def _called(self, run: TrainingRun, name: str) -> Iterator[Finding]:
        if run.step and name not in self.found and self.looked.get(name) != run.step:
            self.looked[name] = run.step
            yield from self._judge(run, name, None)

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        for name in self.layers:
            if name not in self.found:
                yield from self._judge(run, name, "advice")

    def lacks(self, run: TrainingRun) -> str:
        if not self.layers and not self.found:
            return "the copies that follow the model, if there are any (copies=)"
        strange = [name for name, layers in self.layers.items() if not layers and _norms(run.copies.get(name))]
        return (
            f"copies of the model: no BN layer of {', '.join(map(repr, strange))} is one of its own" if strange else ""
        )

    def _judge_average(self, run: TrainingRun, name: str, average: AveragedModel) -> Iterator[Finding]:
        layers = [m for m in average.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        updates = int(average.n_averaged)
        if any(uses(layer)[0] for layer in layers):
            self.measured[name] = updates
        elif layers and updates > 1 and self.measured.get(name) != updates and name not in self.found:
            self.found.add(name)
            yield RULE.found(
                name,
                f"it is an average over {updates} models, and its {len(layers)} BN layers have the statistics of the "
                "last of them (use_buffers=False), not those of the average",
                "torch.optim.swa_utils.update_bn(batches, averaged), or bn.calibrate, before it is used",
                severity="warning",
                step=run.step,
                averaged=updates,
                layers=len(layers),
            )

    def _judge(self, run: TrainingRun, name: str, severity: str | None) -> Iterator[Finding]:
        if not any(not torch.equal(_few(p), before) for p, before in self.parameters[name]):
            return  # a copy that is to stay as it is
        far = [(layer, *layer.apart()) for layer in self.layers[name]]
        stale = [entry for entry in far if entry[1] > MEAN or entry[2] > LOG_VARIANCE]
        if not stale:
            return
        self.found.add(name)
        worst, mean, log_variance = max(stale, key=lambda entry: entry[1] + entry[2])
        yield RULE.found(
            name,
            f"its parameters follow the model, but {len(stale)} of its {len(far)} BN layers still have the statistics "
            f"of the beginning: at {worst.path or 'the model'} the model's mean is {mean:.2g} standard deviations "
            f"away, its variance by a factor of {torch.tensor(log_variance).exp():.2g}",
            "average or copy the buffers, too, or bn.calibrate(the copy, batches) before it is used",
            severity=severity,
            fix=None if name in run.copies else "none",  # of which `fix` would be given the whole
            step=run.step,
            layer=worst.path,
            mean_apart=mean,
            log_variance_apart=log_variance,
            stale=len(stale),
            layers=len(far),
        )


def twins(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The parts of a model that have no gradients beside one of the same make that has, by path: copies of it.

    >>> import copy
    >>> online = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> both = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})
    >>> list(twins(both))
    ['target']
    """
    makes: dict[Any, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        shapes = tuple((name, p.shape) for name, p in module.named_parameters())
        if shapes and any(isinstance(m, _BatchNorm) for m in module.modules()):
            makes.setdefault((type(module), shapes), []).append((path, module))
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for same in makes.values():
        learning = [m for _, m in same if all(p.requires_grad for p in m.parameters())]
        frozen = [(path, m) for path, m in same if not any(p.requires_grad for p in m.parameters())]
        if len(learning) == 1 and len(frozen) == 1:  # of several, it is unknown which copy follows which
            found[frozen[0][0]] = frozen[0][1], learning[0]
    return {path: pair for path, pair in found.items() if not any(path.startswith(f"{other}.") for other in found)}


def counterparts(copied: nn.Module, model: nn.Module, name: str = "") -> dict[str, _BatchNorm]:
    """Return the BN layers of the model that a copy follows, by the paths that they have in the copy.

    >>> import copy
    >>> both = nn.ModuleDict({"G": nn.Sequential(nn.BatchNorm1d(2)), "D": nn.Sequential(nn.BatchNorm1d(3))})
    >>> counterparts(copy.deepcopy(both["D"]), both)["0"] is both["D"][0]
    True

    The copy may be one of the whole model or of a part of it, such as one of several networks in one monitor; either
    may have a wrapper around it. Of parts of the same make, the one counts whose name the copy has, or else whose
    parameters are nearest.
    """
    own, theirs = _norms(copied), _norms(model)
    makes = {path: layer.num_features for path, layer in theirs.items()}
    if any(makes.get(path) == layer.num_features for path, layer in own.items()):
        return theirs
    found = []
    for above in dict.fromkeys(prefix for path in theirs for prefix in _prefixes(path)):
        for wrapper in dict.fromkeys(prefix for path in own for prefix in _prefixes(path)):
            pairs = {path: f"{above}{path[len(wrapper) :]}" for path in own if path.startswith(wrapper)}
            if len(pairs) == len(own) and all(makes.get(at) == own[path].num_features for path, at in pairs.items()):
                found.append((above.rstrip("."), wrapper, {path: theirs[at] for path, at in pairs.items()}))
    if not found:
        return {}
    named = [one for one in found if one[0] == name]
    return min(named or found, key=lambda one: _distance(copied, one[1], model, one[0]))[2]


def _norms(module: nn.Module | None) -> dict[str, _BatchNorm]:
    if module is None:
        return {}
    return {_plain(path): layer for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def _prefixes(path: str) -> list[str]:
    """Return the beginnings of a path, with their dots, none first.

    >>> _prefixes("a.b.c")
    ['', 'a.', 'a.b.']
    """
    parts = path.split(".")
    return [".".join([*parts[:end], ""]) if end else "" for end in range(len(parts))]


def _distance(copied: nn.Module, wrapper: str, model: nn.Module, above: str) -> float:
    """How far the parameters of a copy are from those of a part of the model."""
    start = f"{above}." if above else ""
    theirs = {_plain(name): p for name, p in model.named_parameters()}
    total = 0.0
    for name, p in copied.named_parameters():
        q = theirs.get(start + _plain(name)[len(wrapper) :])
        if q is None or q.shape != p.shape:
            return float("inf")
        total += float((_few(p).double().cpu() - _few(q).double().cpu()).square().sum())
    return total


def _is_plain_average(copied: nn.Module) -> TypeGuard[AveragedModel]:
    """Whether it is an equal average, whose weights may be far from any model's; a moving one stays near."""
    return (
        isinstance(copied, AveragedModel)
        and copied.avg_fn is None
        and getattr(copied, "multi_avg_fn", None) is None
        and not getattr(copied, "use_buffers", False)
    )


def _few(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:FEW].clone()


def _plain(path: str) -> str:
    """A path without the names of wrappers.

    >>> _plain("module.layer1.bn1")
    'layer1.bn1'
    """
    return ".".join(part for part in path.split(".") if part not in ("module", "_orig_mod"))


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Recompute the statistics of the copy, which is the model under repair."""
    batches = repair.need("batches", RULE.code)
    repair.model, done = calibrate(repair.model, batches, forward=repair.forward, progress=False, inplace=True)
    return done.report


RULE = Rule(
    "BN305", "stale-copy", "error", __doc__, needs=("run",), watch=_Watcher, fix=fix, safety="unsafe", keeps=False
)
