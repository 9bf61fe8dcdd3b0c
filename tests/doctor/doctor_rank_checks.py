"""What the rules about ranks find, on three real ones. Run by torchrun; each check is a function of the rank."""

import contextlib
import json
import pathlib
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import batchnorm as bn

TIMEOUT = 4.0


def network(kind=nn.BatchNorm1d, **arguments):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), kind(8, **arguments), nn.ReLU(), nn.Linear(8, 3), kind(3, **arguments))


def seen(model, rank, shift=0.0, batches=5):
    """A model after some batches of this rank's own, which may differ from the others' in more than chance."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(batches):
        model(torch.randn(64, 4, generator=generator) * (1 + shift * rank) + shift * rank)
    return model


def checked(model, code, **more):
    findings = bn.check(model, process_group=dist.group.WORLD, select=[code], **more)
    assert not findings.failed, findings.failed
    assert not findings.skipped, findings.skipped
    return findings


def silent(model, code, **more):
    assert str(checked(model, code, **more)) == "nothing found", str(checked(model, code, **more))


def one_source_a_rank(rank):
    model = seen(network(), rank, shift=1.0, batches=4 + rank)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    findings = checked(model, "BN401")
    assert [finding.path for finding in findings] == ["1", "4"], str(findings)
    furthest = findings[0].numbers["rank"]
    assert furthest != 1, findings[0].numbers
    assert f"rank {furthest} " in findings[0].sentence
    assert findings[0].numbers["batches"] == [4, 5, 6]
    repaired, report = bn.fix(model, findings, unsafe=True)
    assert report.paths == ("1", "4")
    silent(repaired, "BN401")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    # By hand: the statistics of all ranks, each weighing as many batches as it counted.
    means, variances = ([torch.empty(8) for _ in range(3)] for _ in range(2))
    dist.all_gather(means, before["1.running_mean"])
    dist.all_gather(variances, before["1.running_var"])
    mean = sum(n * m for n, m in zip((4, 5, 6), means, strict=True)) / 15
    var = sum(n * (v + (m - mean) ** 2) for n, m, v in zip((4, 5, 6), means, variances, strict=True)) / 15
    torch.testing.assert_close(repaired[1].running_mean, mean)
    torch.testing.assert_close(repaired[1].running_var, var)


def the_same_source(rank):
    silent(seen(network(), rank, batches=60), "BN401")


def synchronised_layers(rank):
    silent(seen(network(bn.SyncBatchNorm), rank, shift=1.0), "BN401")


def monitored(
    rank, shift=0.0, size=64, alone=False, momentum=0.1, wrap=lambda model: model, steps=30, kind=nn.BatchNorm1d
):
    """Train on this rank's own data, which may be of another source, and return what the monitor found."""
    model = network(kind, momentum=momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    run = bn.monitor(model, optimizer, every=5, warn=False, select=["BN401"])
    model = wrap(model)
    with run if rank == 0 or not alone else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(size, 4, generator=generator) * (1 + shift * rank) + shift * rank
            model(x).square().mean().backward()
            optimizer.step()
            dist.barrier()
    assert not run.failed, run.failed
    return run.findings


def a_source_a_rank_under_the_monitor(rank):
    findings = monitored(rank, shift=1.0)
    assert [f.path for f in findings] == ["1"] or {f.path for f in findings} == {"1", "4"}, str(findings)
    assert findings[0].step is not None
    assert findings[0].numbers["rank"] != 1, findings[0].numbers
    assert len(findings[0].numbers["mean_off"]) == 3


def one_source_under_the_monitor(rank):
    findings = monitored(rank)
    assert not findings, str(findings)
    assert not findings.skipped, findings.skipped
    assert not monitored(rank, size=16), "small batches"


def buffers_from_rank_0_under_the_monitor(rank):
    """DistributedDataParallel gives all ranks the buffers of the first before every pass: their batches tell."""
    findings = monitored(rank, shift=1.0, wrap=DistributedDataParallel)
    assert "1" in {f.path for f in findings}, str(findings)
    assert "the batches of rank" in findings[0].sentence
    assert findings[0].numbers["rank"] != 1, findings[0].numbers
    for size in (64, 4):
        assert not monitored(rank, size=size, wrap=DistributedDataParallel, steps=80)


def synchronised_layers_under_the_monitor(rank):
    """What differs between the ranks is in the statistics of all of them."""
    assert not monitored(rank, shift=1.0, kind=bn.SyncBatchNorm)


def one_rank_is_monitored(rank):
    """No rank waits for ranks without a monitor, and the one that has a monitor reports it."""
    findings = monitored(rank, shift=1.0, alone=True)
    assert not findings
    wanted = {"BN401": "needs the monitor on every rank, with the same model"} if rank == 0 else {}
    assert findings.skipped == wanted, findings.skipped


def all_are_monitored_after_one_was(rank):
    monitored(rank, alone=True)
    dist.barrier()
    assert monitored(rank, shift=1.0)


def one_rank_ends_earlier(rank):
    """Its monitor ends, and the others go on without it."""
    model, seen_ = network(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bn.monitor(model, optimizer, every=1, warn=False, select=["BN401"]) as run:
        for _ in range(2 if rank == 1 else 12):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            seen_ += 1
    assert run.step == seen_
    assert not run.failed, run.failed


def nan_on_one(rank):
    model = seen(network(), 0)
    if rank == 1:
        model[1].running_mean[0] = float("nan")
    (finding,) = checked(model, "BN401")
    assert finding.numbers["ranks"] == [1]
    assert finding.fix == "none"


def no_batch_norm(rank):
    silent(nn.Linear(2, 2), "BN401")
    silent(nn.Linear(2, 2), "BN402")


def loader(size):
    return DataLoader(TensorDataset(torch.randn(size, 4)), batch_size=8)


def one_has_fewer_batches(rank):
    model = network(bn.SyncBatchNorm)
    with warnings.catch_warnings():
        findings = checked(model, "BN402", data=loader(16 if rank == 1 else 32), example=torch.randn(8, 4))
    (finding,) = findings
    assert "rank 1 has 2 batches, the others have 4" in finding.sentence, finding.sentence
    assert finding.numbers["batches"] == [4, 2, 4]


def the_same_number_of_batches(rank):
    silent(network(bn.SyncBatchNorm), "BN402", data=loader(32), example=torch.randn(8, 4))
    silent(network(), "BN402", data=loader(16 if rank == 1 else 32), example=torch.randn(8, 4))  # no rank waits


def one_is_in_evaluation_mode(rank):
    model = network(bn.SyncBatchNorm)
    model[4].train(rank != 2)
    (finding,) = checked(model, "BN402")
    assert finding.path == "4"
    assert finding.numbers == {"waiting": [0, 1], "elsewhere": [2]}
    assert finding.severity == "error"


def one_has_fewer_layers(rank):
    model = network(bn.SyncBatchNorm)
    if rank == 0:
        model[4] = nn.BatchNorm1d(3)
    (finding,) = checked(model, "BN402")
    assert finding.numbers["ranks"] == [0]
    assert finding.numbers["synchronised_layers"] == [1, 2, 2]


class Branching(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.one, self.two = (bn.SyncBatchNorm(4, process_group=group) for _ in range(2))

    def forward(self, x, both=True):
        x = self.one(x)
        return self.two(x) if both else x


def watched(rank, learn):
    """The findings of a run whose second step goes wrong."""
    model = Branching(dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = bn.monitor(model, optimizer, warn=False, select=["BN402"])
    message = ""
    try:
        with run:
            for step in range(2):
                optimizer.zero_grad()
                learn(model, torch.randn(4, 4, 3, requires_grad=True), step)
                optimizer.step()
    except bn.BatchNormError as error:
        message = str(error)
    assert not run.failed, run.failed
    dist.barrier()
    return run.findings, message


def one_takes_another_branch(rank):
    findings, message = watched(rank, lambda model, x, step: model(x, both=(rank, step) != (1, 1)).sum().backward())
    assert message
    if rank != 1:
        (finding,) = findings
        assert finding.path == "two", str(findings)
        assert "rank 1" in finding.sentence, finding.sentence
        assert finding.step == 1


def one_skips_the_backward_pass(rank):
    def learn(model, x, step):
        y = model(x).sum()
        if (rank, step) != (1, 1):
            y.backward()

    findings, message = watched(rank, learn)
    if rank != 1:
        (finding,) = findings
        assert finding.path == "two", str(findings)
        assert "rank 1" in finding.sentence, finding.sentence
        assert "backward" in message


def all_are_alike(rank):
    findings, message = watched(rank, lambda model, x, step: model(x).sum().backward())
    assert not findings
    assert not message


def two_passes_through_a_wrapper(rank):
    """Whatever this version of torch does: it is reported if and only if the backward pass raises."""
    for kind in (nn.BatchNorm1d, bn.BatchNorm1d):
        model = DistributedDataParallel(network(kind))
        with bn.monitor(model, warn=False, select=["BN403"]) as run:
            loss = model(torch.randn(8, 4)).sum() + model(torch.randn(8, 4)).sum()
            try:
                loss.backward()
                raised = False
            except RuntimeError as error:
                raised = "modified by an inplace operation" in str(error)
        assert bool(run.findings) == raised, (str(run.findings), raised)
        assert not (raised and kind is bn.BatchNorm1d)
        assert bool(bn.check(model, select=["BN403"])) == raised


CHECKS = (
    a_source_a_rank_under_the_monitor, one_source_under_the_monitor, buffers_from_rank_0_under_the_monitor,
    synchronised_layers_under_the_monitor, one_rank_is_monitored, one_rank_ends_earlier,
    all_are_monitored_after_one_was, one_source_a_rank, the_same_source, synchronised_layers, nan_on_one,
    no_batch_norm, one_has_fewer_batches,
    the_same_number_of_batches, one_is_in_evaluation_mode, one_has_fewer_layers, all_are_alike,
    two_passes_through_a_wrapper, one_takes_another_branch, one_skips_the_backward_pass,
)  # fmt: skip


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, found = dist.get_rank(), {}
    for check in CHECKS:
        try:
            check(rank)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
        pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
