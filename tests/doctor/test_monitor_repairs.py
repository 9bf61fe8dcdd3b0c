"""What was found while training ran, repaired."""

import copy

import torch
from monitored import network, sgd, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn


def test_the_fix_of_a_double_update_silences_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    model = Model()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
    (finding,) = run.findings
    assert (finding.code, finding.numbers["updates"], finding.numbers["calls"]) == ("BN302", 2, 1)
    assert int(model.net[1].num_batches_tracked) == 6
    repaired, report = bn.fix(model, run.findings, example=torch.randn(8, 3))
    assert [(change.path, change.before, change.after) for change in report.changes] == [("net.1", 2, 1)]
    assert report.certificate is not None
    optimizer = sgd(repaired)
    with bn.monitor(repaired, optimizer, warn=False) as run:
        train(repaired, optimizer)
    assert str(run.findings) == "nothing found"
    assert int(repaired.net[1].num_batches_tracked) == 9


def test_the_fix_of_a_stale_copy_calibrates_it():
    model, data = network(), [x + 2 for x in torch.randn(6, 16, 3)]
    ema = copy.deepcopy(model).eval()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, copies={"ema": ema}, warn=False) as run:
        for x in data:
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(ema.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)
        ema(data[0])
    assert [(f.code, f.path, f.severity, f.step) for f in run.findings] == [("BN305", "ema", "error", 6)]
    better, report = bn.fix(ema, run.findings, data=data, example=data[0])
    assert not report.changes
    better, report = bn.fix(ema, run.findings, data=data, example=data[0], unsafe=True)
    assert report.changes
    torch.testing.assert_close(better[1].running_mean, better[0](torch.cat(data)).mean(0))
