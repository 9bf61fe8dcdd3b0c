"""A copy of the model (averaged, target, teacher) that follows its parameters, but not its running statistics.

## What it does
Compares every copy that the monitor was told of (``copies={"ema": averaged}``) with what it was at the beginning and
with the model: its parameters have moved, its running statistics have not, and the model's are elsewhere by now. Found
when such a copy is called with running statistics; if it never is, at the end, as advice.

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
Or measure its own, once, before it is used: ``averaged, _ = bn.calibrate(averaged, batches)``.

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

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.patient import Patient
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.run import Run, uses
from batchnorm.doctor.watcher import Watcher
from batchnorm.records import Finding, Report
from batchnorm.transforms.calibrate import calibrate

FEW = 1000  # values of each parameter that are remembered
MEAN, LOG_VARIANCE = 0.1, 0.2  # the model's statistics are farther away than this


@dataclass
class _Layer:
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
        eps = self.copied.eps
        away = (theirs.running_mean.to(mean) - mean) / (var + eps).sqrt()
        factor = ((theirs.running_var.to(var) + eps) / (var + eps)).log()
        return float(away.double().square().mean().sqrt()), float(factor.double().square().mean().sqrt())


class _Watcher(Watcher):
    def __init__(self) -> None:
        self.layers: dict[str, list[_Layer]] = {}
        self.parameters: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.looked: dict[str, int] = {}
        self.found: set[str] = set()

    def on_begin(self, run: Run) -> Iterator[Finding]:
        of_model = {_plain(path): layer for path, layer in run.layers.items()}
        for name, copied in run.copies.items():
            self.layers[name] = [
                _Layer(path, m, of_model[_plain(path)], m.running_mean.clone(), m.running_var.clone())
                for path, m in copied.named_modules()
                if isinstance(m, _BatchNorm) and _plain(path) in of_model and m is not of_model[_plain(path)]
                if m.running_mean is not None and m.running_var is not None
            ]
            self.parameters[name] = [(p, _few(p)) for p in copied.parameters()]
        yield from ()

    def on_copy(self, run: Run, name: str) -> Iterator[Finding]:
        if run.step and name not in self.found and self.looked.get(name) != run.step:
            self.looked[name] = run.step
            yield from self._judge(run, name, None)

    def on_end(self, run: Run) -> Iterator[Finding]:
        for name in run.copies:
            if name not in self.found:
                yield from self._judge(run, name, "advice")

    def _judge(self, run: Run, name: str, severity: str | None) -> Iterator[Finding]:
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
            step=run.step,
            layer=worst.path,
            mean_apart=mean,
            log_variance_apart=log_variance,
            stale=len(stale),
            layers=len(far),
        )


def _few(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:FEW].clone()


def _plain(path: str) -> str:
    """A path without the names of wrappers.

    >>> _plain("module.layer1.bn1")
    'layer1.bn1'
    """
    return ".".join(part for part in path.split(".") if part not in ("module", "_orig_mod"))


def fix(patient: Patient, findings: Sequence[Finding]) -> Report:
    """Measure the statistics of the copy, which is the patient."""
    batches = patient.need("batches", RULE.code)
    patient.model, done = calibrate(patient.model, batches, forward=patient.forward, progress=False, inplace=True)
    return done.report


RULE = Rule(
    "BN305", "stale-copy", "error", __doc__, needs=("run",), watch=_Watcher, fix=fix, safety="unsafe", keeps=False
)
