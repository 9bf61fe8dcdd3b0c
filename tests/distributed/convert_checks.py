"""Converted layers on several ranks."""

import argparse
import pathlib
import sys

import own_classes
import torch
import torch.distributed as dist
from rank_checks import check, equal_sizes, near, raised, raised_on_all, shares, total
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import sync_race


@check(*[kind.__name__ for kind in own_classes.KEPT])
def converted(name):
    """A class with a forward of its own does the same with the statistics of all ranks."""
    rank = dist.get_rank()
    stock = getattr(own_classes, name)(6).double()
    with torch.no_grad():
        stock.weight.uniform_(0.5, 2.0)
    synced, report = bn.convert(stock, "sync")
    assert report.paths == ("",)
    xs = shares(equal_sizes(), (6, 3, 3))
    for _ in range(2):
        whole, x = torch.cat(xs).requires_grad_(), xs[rank].detach().requires_grad_()
        truth, y = stock(whole), synced(x)
        if isinstance(y, tuple):
            near(y[1].detach(), truth[1].detach()[3 * rank :][:3], 1e-10)
            truth, y = truth[0], y[0]
        dy = torch.randn_like(truth)
        truth.backward(dy)
        y.backward(dy[3 * rank :][:3])
        near(y.detach(), truth.detach()[3 * rank :][:3], 1e-10)
        near(x.grad, whole.grad[3 * rank :][:3], 1e-10)
    near(total(synced.weight.grad), stock.weight.grad, 1e-10)
    for key, buffer in synced.named_buffers():
        near(buffer, dict(stock.named_buffers())[key], 1e-10)
    stock.eval(), synced.eval()
    first = [out[0] if isinstance(out, tuple) else out for out in (synced(xs[0]), stock(xs[0]))]
    near(*[out.detach() for out in first], 1e-10)


@check()
def the_example_trains_the_race_s_network_along_one_curve():
    rank, size = dist.get_rank(), dist.get_world_size()
    options = argparse.Namespace(seed=0, dtype=torch.float64, batch_size=32, steps=6, rate=0.5)
    stock = sync_race.network(0, torch.float64)
    model, report = bn.convert(stock, "sync")
    assert len(report.changes) == 21
    assert not report.left
    each = 32 // size
    losses = sync_race.train(DistributedDataParallel(model), options, slice(rank * each, (rank + 1) * each))
    whole = sync_race.train(stock, options)
    near(total(torch.tensor(losses, dtype=torch.float64)) / size, torch.tensor(whole, dtype=torch.float64), 1e-9)
    assert whole[-1] < whole[0]
    for (name, a), b in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        near(a, b, 1e-8), name
    back, _ = bn.convert(model, "batch")
    assert sync_race.accuracy(back, torch.float64) == sync_race.accuracy(stock, torch.float64)


@check()
def a_forward_that_does_not_come_to_its_normalisation():
    layer, report = bn.convert(own_classes.Fickle(6))
    assert not report.left
    x = torch.randn(4, 6, 3, 3)
    layer(x)
    layer.away = True
    assert "the forward of Fickle did not come to its normalisation" in raised(lambda: layer(x))
    layer.eval()(x)


@check()
def masked():
    """Padding counts on no rank; `MaskedBatchNorm` is synchronised by `convert`."""
    rank = dist.get_rank()
    xs = shares(equal_sizes(), (6, 5))
    lengths = torch.tensor([(3 * i) % 6 for i in range(3 * dist.get_world_size())])
    stock = bn.MaskedBatchNorm(6).double()
    synced, _ = bn.convert(stock)
    whole, x = torch.cat(xs).requires_grad_(), xs[rank].detach().requires_grad_()
    truth, y = stock(whole, lengths), synced(x, lengths[3 * rank :][:3])
    dy = torch.randn_like(truth)
    truth.backward(dy)
    y.backward(dy[3 * rank :][:3])
    near(y.detach(), truth.detach()[3 * rank :][:3], 1e-10)
    near(x.grad, whole.grad[3 * rank :][:3], 1e-10)
    near(synced.running_var, stock.running_var, 1e-10)


@check()
def another_layer_at_first_sight_by_its_path():
    """Where `convert` gave the layers their paths, even the first step tells them apart."""
    model, _ = bn.convert(nn.ModuleDict({"one": nn.BatchNorm1d(4), "two": nn.BatchNorm1d(4)}))
    name = "two" if dist.get_rank() == 1 else "one"
    message = raised(lambda: model[name](torch.randn(4, 4, 3)))
    raised_on_all(message, f"'{name}' (SyncBatchNorm1d, 4 channels): step 1 (forward)", "rank 1 is in")
