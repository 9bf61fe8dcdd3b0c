"""A rank that skips a synchronised layer: the others wait for it until the group gives up.

## What it does
Before training, every rank of the process group says how many synchronised layers it has, in which mode, and how many
batches its DataLoader gives; where they differ, the rank is named. While training runs under ``bn.monitor``, a rank
that does not come to an exchange of our layers is named with the layer and the step (our layers find out by themselves,
within the group's timeout), and that is kept as a finding. Torch's own SyncBatchNorm says nothing while it waits.

## Why is this bad?
A synchronised layer is a conversation: all ranks or none. One that takes another branch, has one batch fewer, or has
the layer in evaluation mode leaves the others in a call that never ends, without a word about who or where.

## Example
```python
for x in loader:  # rank 1's share of the data has a batch fewer
    loss = model(x).mean()
```

## Use instead
```python
sampler = DistributedSampler(dataset, drop_last=True)  # as many batches on every rank
y = layer(x[:0])  # or: a rank without samples takes part with an empty batch
```

## Fix safety
No automatic fix: the loop, the data or the branch has to change.

## References
- pytorch/pytorch#44957
- pytorch/pytorch#91872
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.distributed.agreement import Together
from batchnorm.distributed.groups import members
from batchnorm.distributed.ledger import SAME, in_words
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject
from batchnorm.doctor.watcher import TrainingRun, Watcher
from batchnorm.errors import BatchNormError
from batchnorm.layers.switches import uses
from batchnorm.layers.sync import Synchronised
from batchnorm.records import Finding

REPAIR = f"{SAME}; as many batches on every rank (DistributedSampler, drop_last=True)"


def look(subject: Subject) -> Iterator[Finding]:
    """Compare what the ranks are about to do."""
    together, ranks = Together(subject.process_group, "check"), members(subject.process_group)
    layers = [(path, layer) for path, layer in subject.layers if synchronised(layer)]
    try:
        batches = -1 if subject.loader is None else len(subject.loader)
    except TypeError:  # a stream
        batches = -1
    rows = together.rows(torch.tensor([float(len(layers)), float(batches)]))
    counts, lengths = ([int(n) for n in column] for column in rows.T.tolist())
    if len(set(counts)) > 1:
        yield _apart("", "synchronised layers", ranks, counts)
        return
    if not layers:
        return
    if len(set(lengths)) > 1 and -1 not in lengths:
        yield _apart(layers[0][0], "batches", ranks, lengths)
    modes = [float(2 * a + b) for a, b in (uses(layer) for _, layer in layers)]
    by_rank = together.rows(torch.tensor(modes)).T.tolist()
    for (path, _), modes in zip(layers, by_rank, strict=True):
        if len({mode >= 2 for mode in modes}) > 1:
            training = [rank for rank, mode in zip(ranks, modes, strict=True) if mode >= 2]
            rest = [rank for rank in ranks if rank not in training]
            have = "have" if len(rest) > 1 else "has"
            yield RULE.found(
                path,
                f"in training mode on {in_words(training)}, it waits for {in_words(rest)}, which {have} it in "
                "evaluation mode",
                REPAIR,
                waiting=training,
                elsewhere=rest,
            )


def _apart(path: str, what: str, ranks: list[int], numbers: list[int]) -> Finding:
    most = max(set(numbers), key=numbers.count)
    stray = [rank for rank, n in zip(ranks, numbers, strict=True) if n != most]
    odd = ", ".join(f"rank {rank} has {n}" for rank, n in zip(ranks, numbers, strict=True) if rank in stray)
    return RULE.found(
        path,
        f"{odd} {what}, the other{'s have' if len(ranks) - len(stray) > 1 else ' has'} {most}: some will wait for "
        "the others for ever",
        REPAIR,
        ranks=stray,
        **{what.replace(" ", "_"): numbers},  # type: ignore[arg-type]
    )


def synchronised(layer: _BatchNorm) -> bool:
    """Whether other processes have a part in a layer's statistics."""
    return isinstance(layer, nn.SyncBatchNorm) or (isinstance(layer, Synchronised) and layer._shares())


class _Watcher(Watcher):
    """Keeps what the layers' own ledger found, when it ends a forward pass, or the run by a backward pass."""

    def on_return(self, run: TrainingRun, output: Any) -> Iterator[Finding]:
        return self._taken(run)

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        return self._taken(run)

    def _taken(self, run: TrainingRun) -> Iterator[Finding]:
        error = sys.exc_info()[1]  # these are called while it is on its way
        if not isinstance(error, BatchNormError) or SAME not in error.do:
            return
        title = re.match(r"'(.+?)' \(", error.where)
        named = "" if title is None else title[1]
        path = next((path for path in run.layers if path == named or path.endswith("." + named)), named)
        yield RULE.found(path, " ".join(error.problem.split()).rstrip("."), REPAIR, step=run.step, call=run.call)


RULE = Rule("BN402", "collective-mismatch", "error", __doc__, look, ("model", "ranks"), watch=_Watcher)
