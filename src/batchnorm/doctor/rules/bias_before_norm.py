"""A bias in front of batch normalisation, which cancels it.

## What it does
Finds convolutions and linear layers with a bias whose output goes to BN layers only.

## Why is this bad?
BN subtracts the mean of every channel, and with it any constant that was added to the channel. The bias is memory, an
optimiser state, a memory pass in the backward step, and a parameter that weight decay or noise can still move, all for
nothing; its gradient is zero but for rounding. The paper drops it: beta takes its place.

## Example
```python
nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
```

## Use instead
```python
nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64))
```

## Fix safety
Safe: `batchnorm.drop_bias` takes the bias out of ``running_mean`` too, so that evaluation does not change; a frozen
BN layer does not cancel a bias, and is not touched.

## References
- Ioffe & Szegedy (2015), section 3.2
- milesial/Pytorch-UNet#325
- Lightning-AI/pytorch-lightning#1551
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.records import Finding, Report
from batchnorm.transforms.drop_bias import drop_bias, norms_after


def look(subject: Subject) -> Iterator[Finding]:
    """Follow what every layer with a bias makes, to BN layers and nothing else."""
    model, graph = subject.net, subject.graph
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, _ConvNd)) and layer.bias is not None:
            norms = norms_after(graph, model, path, layer)
            if not isinstance(norms, str):
                size = layer.bias.numel()
                subtracts = f"{' and '.join(norms)} subtract{'s' if len(norms) == 1 else ''} the mean"
                yield RULE.found(
                    path,
                    f"its bias of {size} values does nothing: {subtracts}",
                    "bias=False; bn.drop_bias(model, example) does it without changing evaluation",
                    values=size,
                    largest=float(layer.bias.detach().abs().max()),
                )


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Drop the biases that were found, and no others."""
    repair.model, report = drop_bias(
        repair.model, repair.need("example", RULE.code), forward=repair.forward, optimizer=repair.optimizers,
        modules=[finding.path for finding in findings],
    )  # fmt: skip
    return report


RULE = Rule("BN101", "bias-before-norm", "advice", __doc__, look, ("model", "example"), fix=fix, safety="safe")
