"""Ranks whose running statistics differ: what is saved depends on who saves it.

## What it does
Every rank of the process group sends its running statistics, and all compare them: by how many standard deviations the
means differ from those of all ranks together, by which factor the variances, and which rank is furthest.

While training runs under ``bn.monitor`` on every rank, the ranks put up the statistics of up to 8 layers in every
``every``-th step and compare them as soon as all have; no rank waits for another. A layer is reported if its statistics
differ by more than a running average normally fluctuates (0.25 standard deviations, a factor of 1.5) in two comparisons
in a row. The same is done with the batches of those steps, because the running statistics are never far apart where
DistributedDataParallel copies rank 0's buffers before every pass, as it does by default. A layer is reported if the
batches of a rank differed from the others' in the same way in six comparisons (0.4 standard deviations, a factor of
1.8).

## Why is this bad?
Without synchronised layers every rank's BN sees its own share of the data. The ranks' parameters are kept equal by
their gradients, the statistics by nothing: each rank evaluates another network, and rank 0 saves its own. With
DistributedDataParallel's broadcast all but rank 0's are thrown away at every step, with shares of the data that differ
(sorted, or one source a rank) they are not those of the data at all.

## Example
```python
model = DistributedDataParallel(model, broadcast_buffers=False)
...
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")  # the statistics of one share of the data
```

## Use instead
```python
model, report = bn.convert(model, "sync")  # before wrapping: the batch of all ranks
model, calibrated = bn.calibrate(model, batches, process_group=dist.group.WORLD)  # or measure them, once, at the end
```

## Fix safety
Unsafe: it changes evaluation on every rank. The statistics become those of all ranks together, each weighing as many
batches as it counted, with the variance between them. Every rank has to call ``fix``.

## References
- huggingface/pytorch-image-models#110
- facebookresearch/fvcore#152
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.distributed.agreement import Together
from batchnorm.distributed.board import Board
from batchnorm.distributed.groups import members
from batchnorm.doctor.gap import MEAN, VARIANCE
from batchnorm.doctor.repair import Repair
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Norm, Subject, norm_of, spread
from batchnorm.doctor.tallies import layer_is_local
from batchnorm.doctor.turns import Difference, Turn, differ, difference
from batchnorm.doctor.watcher import Pass, TrainingRun, Watcher
from batchnorm.moments import Moments, distance, merged
from batchnorm.records import Change, Finding, Report
from batchnorm.transforms.measuring import replaced

OFF, APART = 0.1, 0.1  # standard deviations; natural logarithm of the ratio of variances
LAYERS, CHANNELS = 8, 64  # of a model that are compared while it trains, at most
TWICE = 2  # comparisons in a row
HISTORY = 6  # comparisons of batches
PATIENCE = 3  # entries that the others have not answered
REPAIR = 'bn.convert(model, "sync") before training; now bn.calibrate with process_group=, or bn.fix'


def look(subject: Subject) -> Iterator[Finding]:
    """Compare the statistics of each rank with those of all ranks together."""
    norms = [norm for norm in subject.norms if _flat(norm)]
    ranks = members(subject.process_group)
    for norm, parts in zip(norms, _of_all(norms, subject.process_group), strict=True):
        off, apart = distance(parts.mean, parts.var, *merged(parts)[1:], norm.eps)
        lost = ~(off.isfinite() & apart.isfinite())
        if bool(lost.all()):  # no rank has statistics to compare, or all were merged with bad ones
            lost = ~(parts.mean.isfinite().all(1) & parts.var.isfinite().all(1))
            if not bool(lost.any()) or bool(lost.all()):
                continue
            bad = [rank for rank, one in zip(ranks, lost.tolist(), strict=True) if one]
            yield RULE.found(
                norm.path,
                f"its running statistics are not finite on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}",
                "load a checkpoint on every rank, or bn.calibrate with process_group=",
                fix="none",
                ranks=bad,
            )
            continue
        far = int((off / OFF).maximum(apart / APART).argmax())
        if float(off.max()) > OFF or float(apart.max()) > APART:
            yield _found(norm.path, ranks, far, off, apart, parts)


def _found(
    path: str,
    ranks: Sequence[int],
    far: int,
    off: Tensor,
    apart: Tensor,
    parts: Moments,
    run: TrainingRun | None = None,
) -> Finding:
    return RULE.found(
        path,
        f"its running mean on rank {ranks[far]} is {float(off[far]):.2g} standard deviations from that of all "
        f"{len(ranks)} ranks, and its variance by a factor of {math.exp(float(apart[far])):.2g}: what is saved "
        "depends on the rank",
        REPAIR,
        fix=None if run is None else "none",
        step=None if run is None else run.step,
        rank=ranks[far],
        mean_off=off.tolist(),
        variance_log_ratio=apart.tolist(),
        batches=parts.count.tolist(),
    )


def _batches_differ(path: str, far: Difference, run: TrainingRun) -> Finding:
    return RULE.found(
        path,
        f"in {HISTORY} of {HISTORY} steps the batches of rank {far.position} differed from those of the others in the "
        f"same way: their means by {far.of_mean:.2g} standard deviations, their variances by a factor of "
        f"{math.exp(far.of_log_variance):.2g}; the running statistics that are saved are those of one rank",
        REPAIR,
        fix="none", step=run.step, rank=far.position, mean_off=far.of_mean, variance_log_ratio=far.of_log_variance,
    )  # fmt: skip


class _Watcher(Watcher):
    """Puts up the statistics of some layers for the other ranks, and compares them when all have done so."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.paths: list[str] = []
        self.moved: set[str] = set()
        self.entries = 0
        self.compared = -1  # the last entry that was compared
        self.off: dict[str, int] = {}  # comparisons in a row in which a layer was off
        self.batches: dict[str, Moments] = {}  # of this step
        self.turns: dict[str, deque[Turn]] = {}  # the batches of all ranks, in place of the calls of a step

    def on_begin(self, run: TrainingRun) -> Iterator[Finding]:
        flat = [path for path, layer in run.layers.items() if _flat(norm_of(path, layer))]
        self.paths = spread(flat, LAYERS)
        names = ";".join(f"{path} {run.layers[path].num_features}" for path in self.paths)
        self.board = Board(f"{zlib.crc32(names.encode()):08x}") if self.paths else None
        yield from ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterator[Finding]:
        if seen.updates:
            self.moved.add(seen.path)
            if run.looking and seen.path in self.paths and seen.path not in self.batches and self._compares(run, seen):
                self.batches[seen.path] = seen.moments
        yield from ()

    def _compares(self, run: TrainingRun, seen: Pass) -> bool:
        alone = self.board is None or self.board.store is None or self.entries - self.compared > PATIENCE
        return not alone and layer_is_local(seen.layer)

    def on_step(self, run: TrainingRun) -> Iterator[Finding]:
        if self.board is None or self.board.store is None:
            return
        due = run.step % run.every == 0
        if due or self.entries - self.compared <= PATIENCE:  # else the others have no monitor: ask less often
            yield from self._compare(run)
        if due:
            self.board.put(self.entries, self._numbers(run))
            self.entries += 1
        self.batches.clear()

    def on_end(self, run: TrainingRun) -> Iterator[Finding]:
        if self.board is not None and self.board.store is not None:
            yield from self._compare(run)
            self.board.clear()

    def lacks(self, run: TrainingRun) -> str:
        alone = self.board is not None and self.board.ranks > 1 and self.entries > TWICE and self.compared < 0
        return "the monitor on every rank, with the same model" if alone else ""

    def _numbers(self, run: TrainingRun) -> list[float]:
        numbers: list[float] = []
        for path in self.paths:
            norm = norm_of(path, run.layers[path])
            assert norm.running_mean is not None
            assert norm.running_var is not None
            count = 1 if norm.num_batches_tracked is None else max(int(norm.num_batches_tracked), 1)
            batch = self.batches.get(path)
            unknown = torch.full_like(norm.running_mean, math.nan)
            own = (norm.running_mean, norm.running_var, *((unknown, unknown) if batch is None else batch[1:]))
            few = [value for t in own for value in t.detach()[:CHANNELS].double().cpu().tolist()]
            numbers += [float(count if path in self.moved else 0), *few]
        return numbers

    def _compare(self, run: TrainingRun) -> Iterator[Finding]:
        """Compare the last entry, once all ranks have put it up."""
        entry = self.entries - 1
        rows = self.board.read(entry) if self.board is not None and entry > self.compared else None
        if rows is None or len({len(row) for row in rows}) > 1:
            return
        self.compared, at = entry, 0
        numbers = torch.tensor(rows, dtype=torch.float64)
        for path in self.paths:
            layer = run.layers[path]
            width = min(layer.num_features, CHANNELS)
            own = numbers[:, at : at + 1 + 4 * width]
            counts, mean, var, of_batch, var_of_batch = torch.split(own, [1, width, width, width, width], 1)
            at += 1 + 4 * width
            parts = Moments(counts[:, 0], mean, var)
            if not bool((counts > 0).all()):  # it does not train on some of them
                continue
            off, apart = distance(parts.mean, parts.var, *merged(parts)[1:], layer.eps)
            beyond = float(off.max()) > MEAN or float(apart.max()) > VARIANCE  # not so if one is NaN: that is BN203's
            self.off[path] = self.off.get(path, 0) + 1 if beyond else 0
            if self.off[path] == TWICE:
                far = int((off / MEAN).maximum(apart / VARIANCE).argmax())
                yield _found(path, range(len(rows)), far, off, apart, parts, run)
            if width > 1 and bool((of_batch.isfinite() & var_of_batch.isfinite()).all()):  # one channel proves little
                logs = (var_of_batch + layer.eps).log()
                turns = self.turns.setdefault(path, deque(maxlen=HISTORY))
                turns.append(Turn(moments=list(zip(of_batch, logs, strict=True))))
                if len(turns) == HISTORY and differ(differs := difference(list(turns))):
                    yield _batches_differ(path, differs, run)


def _flat(norm: Norm) -> bool:
    return norm.running_mean is not None and norm.running_var is not None and norm.running_mean.dim() == 1


def _of_all(norms: Sequence[Norm], group: object) -> list[Moments]:
    """The statistics of every rank, a row each, layer by layer; a rank's weight is how many batches it counted."""
    numbers: list[Tensor] = [torch.zeros(1)]  # so that there is something to send
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        count = 1 if norm.num_batches_tracked is None else max(int(norm.num_batches_tracked), 1)
        numbers += [torch.tensor([float(count)]), norm.running_mean.detach().cpu(), norm.running_var.detach().cpu()]
    rows = Together(group, "check").rows(torch.cat([t.double() for t in numbers]))
    found, at = [], 1
    for norm in norms:
        assert norm.running_mean is not None
        channels = len(norm.running_mean)
        counts, mean, var = torch.split(rows[:, at : at + 1 + 2 * channels], [1, channels, channels], 1)
        found.append(Moments(counts[:, 0], mean, var))
        at += 1 + 2 * channels
    return found


def fix(repair: Repair, findings: Sequence[Finding]) -> Report:
    """Give every rank the statistics of all."""
    modules = dict(repair.model.named_modules(remove_duplicate=False))
    wanted = dict.fromkeys(finding.path for finding in findings)
    layers = [(path, layer) for path in wanted if isinstance(layer := modules[path], _BatchNorm)]
    norms = [Norm(path, None, None, m.running_mean, m.running_var, m.num_batches_tracked, m) for path, m in layers]
    changes: list[Change] = []
    for (path, layer), parts in zip(layers, _of_all(norms, repair.process_group), strict=True):
        whole = merged(parts)
        changes += replaced(path, layer, whole.mean, whole.var)
    return Report(tuple(changes))


RULE = Rule(
    "BN401", "diverged-ranks", "warning", __doc__, look, ("model", "ranks"), watch=_Watcher, fix=fix, safety="unsafe",
    keeps=False,
)  # fmt: skip
