"""What every rank checks: SyncBatchNorm beside one process that is fed the concatenated batch.

Run by torchrun (see `ranks.launch`); each check runs on all ranks, and each rank writes what it found.
"""

import copy
import json
import pathlib
import pickle
import sys
import traceback
import warnings
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import own_classes
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm import kernels, reference
from batchnorm.distributed.ledger import ledger_of

CHECKS = {}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(*cases):
    """Register a function, once for each of the arguments given."""

    def register(function):
        for case in cases or ((),):
            case = case if isinstance(case, tuple) else (case,)
            name = "-".join([function.__name__, *(str(part).replace("torch.", "") for part in case)])
            CHECKS[name] = lambda case=case: function(*case)
        return function

    return register


def near(actual, expected, tolerance):
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    expected = expected.to(actual.dtype)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(largest, 1e-3))


def total(tensor):
    tensor = tensor.detach().to(torch.float64).clone()
    dist.all_reduce(tensor)
    return tensor


def shares(sizes, rest, dtype=torch.float64, offset=1.0):
    """Every rank's batch, made alike on every rank; channels differ in mean and scale."""
    whole = torch.randn(sum(sizes), *rest, dtype=torch.float64)
    per_channel = (1, rest[0], *[1] * (len(rest) - 1))
    whole = whole * (torch.rand(per_channel, dtype=torch.float64) + 0.5)
    whole = whole + offset * torch.randn(per_channel, dtype=torch.float64)
    return list(whole.to(dtype).split(sizes))


def equal_sizes(size=3):
    return [size] * dist.get_world_size()


def single(channels, dims, dtype, **arguments):
    """Torch's layer in a state that no default would produce."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    layer = kind(channels, dtype=dtype, **arguments)
    with torch.no_grad():
        for tensor, low, high in (
            (layer.weight, 0.5, 2.0),
            (layer.bias, -1.0, 1.0),
            (layer.running_mean, -1.0, 1.0),
            (layer.running_var, 0.5, 2.0),
        ):
            if tensor is not None:
                tensor.uniform_(low, high)
    return layer


def ours(layer, process_group=None, **more):
    arguments = {"affine": layer.affine, "track_running_stats": layer.track_running_stats, "dtype": more.pop("dtype")}
    made = bn.SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, process_group=process_group, **arguments, **more
    )
    made.load_state_dict(copy.deepcopy(layer.state_dict()))
    return made


def relaid(x, layout):
    if layout == "last" and len(x):
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "permuted":
        return x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    if layout == "sliced":
        return torch.stack((x, x), -1)[..., 0]
    return x


def compare(xs, dtype, *, activation=None, residual=False, layout="plain", group=None, mine=None, tolerance=None):
    """One training step of both, and everything that comes out of it."""
    mine = dist.get_rank() if mine is None else mine
    dims, channels = xs[0].dim(), xs[0].shape[1]
    # The truth is torch's, in float64, on the whole batch.
    stock = single(channels, dims, dtype)
    layer = ours(stock, group, dtype=dtype, activation=activation)
    stock = stock.double()
    whole = torch.cat(xs).double().requires_grad_()
    others = torch.randn_like(whole).to(dtype)
    dy = torch.randn_like(whole).to(dtype)
    truth = stock(whole)
    added = others.double().requires_grad_()
    if residual:
        truth = truth + added
    truth = {None: lambda z: z, "relu": torch.relu, "silu": nn.functional.silu}[activation](truth)
    truth.backward(dy.double())

    start = sum(len(x) for x in xs[:mine])
    part = slice(start, start + len(xs[mine]))
    x = relaid(xs[mine], layout).detach().requires_grad_()
    r = relaid(others[part], layout).detach().requires_grad_() if residual else None
    y = layer(x, residual=r) if residual else layer(x)
    y.backward(relaid(dy[part], layout))
    tolerance = tolerance or TOLERANCE[dtype]
    near(y.detach(), truth.detach()[part], tolerance)
    near(x.grad, whole.grad[part], tolerance)
    assert y.dtype == dtype
    if layout == "last" and len(x):
        assert y.is_contiguous(memory_format=torch.channels_last)
    if residual:
        near(r.grad, added.grad[part], tolerance)
    if group is None:
        for parameter, expected in ((layer.weight, stock.weight), (layer.bias, stock.bias)):
            near(total(parameter.grad), expected.grad, tolerance)
    for name in ("running_mean", "running_var"):
        near(getattr(layer, name), getattr(stock, name), tolerance)
    assert int(layer.num_batches_tracked) == 1
    return layer


KERNELS = ("native", "torch")
FLOATS = (torch.float64, torch.float32)


class on_kernel:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        kernels.kernel()
        self.before = kernels._kernel
        if self.name == "torch":
            kernels._kernel = None

    def __exit__(self, *_):
        kernels._kernel = self.before


@check(*[(d, k, lay) for d in FLOATS for k in KERNELS for lay in ("plain", "last", "permuted", "sliced")])
def step(dtype, kernel, layout):
    with on_kernel(kernel):
        compare(shares(equal_sizes(), (16, 5, 7), dtype), dtype, layout=layout)


@check(*[(d, k, a, r) for d in FLOATS for k in KERNELS for a in (None, "relu", "silu") for r in (False, True)])
def fused(dtype, kernel, activation, residual):
    with on_kernel(kernel):
        compare(shares(equal_sizes(4), (16, 6, 6), dtype), dtype, activation=activation, residual=residual)


@check((16,), (6, 9), (3, 4, 4), (20, 2, 3, 4))
def dimensions(*rest):
    for dtype in FLOATS:
        compare(shares(equal_sizes(5), rest, dtype), dtype)


@check(*KERNELS)
def bfloat16(kernel):
    with on_kernel(kernel):
        compare(shares(equal_sizes(), (16, 5, 7), torch.bfloat16), torch.bfloat16)


@check(*[(d, k) for d in FLOATS for k in KERNELS])
def different_sizes(dtype, kernel):
    with on_kernel(kernel):
        sizes = [1 + 3 * rank for rank in range(dist.get_world_size())]
        compare(shares(sizes, (16, 3, 5), dtype), dtype, activation="relu")


@check(*[(d, k, who, lay) for d in FLOATS for k in KERNELS for who in ("first", "last") for lay in ("plain", "last")])
def empty_rank(dtype, kernel, who, layout):
    with on_kernel(kernel):
        sizes = equal_sizes(4)
        sizes[0 if who == "first" else -1] = 0
        compare(shares(sizes, (16, 3, 5), dtype), dtype, activation="relu", residual=True, layout=layout)


@check(*FLOATS)
def one_value_on_each_rank(dtype):
    compare(shares(equal_sizes(1), (8,), dtype), dtype, tolerance=10 * TOLERANCE[dtype])


@check()
def all_but_one_empty():
    sizes = [0] * dist.get_world_size()
    sizes[-1] = 6
    compare(shares(sizes, (8, 3), torch.float64), torch.float64)


@check()
def everyone_empty():
    layer = bn.SyncBatchNorm(5)
    x = torch.empty(0, 5, 3, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    assert torch.equal(layer.running_mean, torch.zeros(5))
    assert torch.equal(layer.running_var, torch.ones(5))


@check()
def one_value_in_all():
    layer = bn.SyncBatchNorm(5)
    x = torch.ones(1 if dist.get_rank() == 0 else 0, 5)
    told = raised(lambda: layer(x))
    assert "more than 1 value per channel" in told
    assert torch.equal(layer.running_mean, torch.zeros(5))


@check(*KERNELS)
def a_large_mean_costs_no_digits(kernel):
    with on_kernel(kernel):
        x = shares(equal_sizes(8), (16, 6, 6), torch.float64)[dist.get_rank()]
        x = (x + 1e4 * (1 + dist.get_rank())).float()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        whole = torch.cat(parts).double()
        truth = nn.functional.batch_norm(whole, None, None, training=True)
        layer = bn.SyncBatchNorm(16, affine=False)
        near(layer(x), truth[8 * dist.get_rank() :][:8], 2e-3)
        near(layer.running_var.double(), 0.9 + 0.1 * whole.var((0, 2, 3)), 1e-6)


@check("relu", "silu")
def the_reference_agrees(activation):
    """Algorithm 1 in NumPy, on the whole batch: outputs, all gradients, running statistics."""
    sizes = [2 + rank for rank in range(dist.get_world_size())]
    xs = shares(sizes, (4, 3))
    layer = ours(single(4, 3, torch.float64), dtype=torch.float64, activation=activation)
    before = [buffer.clone().numpy() for buffer in (layer.running_mean, layer.running_var)]
    start = sum(sizes[: dist.get_rank()])
    part = slice(start, start + sizes[dist.get_rank()])
    whole, dy = torch.cat(xs).numpy(), torch.randn(sum(sizes), 4, 3, dtype=torch.float64)
    x = xs[dist.get_rank()].detach().requires_grad_()
    y = layer(x)
    y.backward(dy[part])
    gamma, beta = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    truth = reference.batch_norm_forward(whole, gamma, beta, activation=activation)
    grads = reference.batch_norm_backward(dy.numpy(), whole, gamma, beta, activation=activation)
    mean, var = reference.update_running(*before, truth.mu, truth.var, truth.m)
    for actual, expected in (
        (y.detach(), truth.y[part]),
        (x.grad, grads.dx[part]),
        (total(layer.weight.grad), grads.dgamma),
        (total(layer.bias.grad), grads.dbeta),
        (layer.running_mean, mean),
        (layer.running_var, var),
    ):
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10, atol=1e-11)


@check()
def more_channels_than_one_message_holds():
    compare(shares(equal_sizes(3), (5000,)), torch.float64)


@check()
def all_ranks_have_the_same_bits():
    layer = bn.SyncBatchNorm(16)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        layer(torch.randn(3, 16, 4, 4))
    both = torch.cat((layer.running_mean, layer.running_var))
    parts = [torch.empty_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, both)
    assert all(torch.equal(part, both) for part in parts)


@check()
def several_groups():
    """Two halves, each with statistics of its own, beside a layer that all share."""
    size, rank = dist.get_world_size(), dist.get_rank()
    half = size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    index = int(rank >= half)
    assert bn.SyncBatchNorm(3, process_group=groups[index]).process_group is groups[index]
    told = raised(lambda: bn.SyncBatchNorm(3, process_group=groups[1 - index]))
    assert "this process is not in" in told
    xs = shares(equal_sizes(), (16, 3, 3))
    compare(xs[index * half :][:half], torch.float64, group=groups[index], mine=rank - index * half)
    compare(xs, torch.float64)


@check()
def a_group_is_shared_by_copies_and_missed_in_a_pickle():
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = bn.SyncBatchNorm(4, process_group=group)
    assert "ranks=[0, 1" in repr(layer)
    twin = copy.deepcopy(layer)
    assert twin.process_group is group
    loaded = pickle.loads(pickle.dumps(layer))
    assert "cannot hold one" in raised(lambda: loaded(torch.randn(4, 4)))
    loaded.process_group = None
    assert loaded(torch.randn(4, 4)).shape == (4, 4)
    plain = pickle.loads(pickle.dumps(bn.SyncBatchNorm(4)))
    assert plain(torch.randn(4, 4)).shape == (4, 4)


@check()
def twice_in_one_step():
    xs = [shares(equal_sizes(), (6, 3, 3)) for _ in range(2)]
    stock = single(6, 4, torch.float64)
    layer = ours(stock, dtype=torch.float64)
    wholes = [torch.cat(x).requires_grad_() for x in xs]
    # The second use is applied to the first one's output: both are in one graph.
    truth = stock(torch.sin(stock(wholes[0])) * wholes[1])
    dy = torch.randn_like(truth)
    truth.backward(dy)
    rank = dist.get_rank()
    mine = [x[rank].detach().requires_grad_() for x in xs]
    y = layer(torch.sin(layer(mine[0])) * mine[1])
    y.backward(dy[3 * rank :][:3])
    near(y.detach(), truth.detach()[3 * rank :][:3], 1e-10)
    for a, b in zip(mine, wholes, strict=True):
        near(a.grad, b.grad[3 * rank :][:3], 1e-10)
    near(total(layer.weight.grad), stock.weight.grad, 1e-10)
    near(layer.running_var, stock.running_var, 1e-10)


def network(norm):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 6, 3), norm(6), nn.Flatten(), nn.Linear(54, 3)
    )


@check(*[(d, s) for d in FLOATS for s in ("equal", "different")])
def under_ddp(dtype, sizes):
    """Five steps of SGD, in the same places as one process's; the loss is the mean over the whole batch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    counts = equal_sizes(4) if sizes == "equal" else [0, *[3 + r for r in range(1, size)]]
    stock = network(nn.BatchNorm2d).to(dtype)
    model = network(bn.SyncBatchNorm).to(dtype)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(9)
    optimisers = [torch.optim.SGD(m.parameters(), 0.1) for m in (stock, model)]
    for _ in range(5):
        xs = shares(counts, (2, 5, 5), dtype)
        targets = torch.randint(3, (sum(counts),))
        for optimiser in optimisers:
            optimiser.zero_grad()
        nn.functional.cross_entropy(stock(torch.cat(xs)), targets).backward()
        start = sum(counts[:rank])
        losses = nn.functional.cross_entropy(ddp(xs[rank]), targets[start:][: counts[rank]], reduction="sum")
        (losses * size / sum(counts)).backward()
        for optimiser in optimisers:
            optimiser.step()
    for (name, a), (_, b) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        near(a, b, 1e-9 if dtype == torch.float64 else 5e-5), name


@check()
def collectives_are_counted():
    ledger = ledger_of(dist.group.WORLD)
    layer = bn.SyncBatchNorm(4)

    def exchanges(function):
        before = ledger.exchanges
        function()
        return ledger.exchanges - before

    x = torch.randn(4, 4, 3, requires_grad=True)
    assert exchanges(lambda: layer(x)) == 1
    y = layer(x)
    assert exchanges(lambda: y.sum().backward()) == 1
    first = layer(x.detach())  # no rank's input needs a gradient: the sums are of no use to anybody
    assert exchanges(lambda: first.pow(3).sum().backward()) == 0
    layer.eval()
    assert exchanges(lambda: layer(x).sum().backward()) == 0


@check()
def a_rank_whose_input_needs_no_gradient():
    xs = shares(equal_sizes(), (5, 4))
    rank = dist.get_rank()
    stock = single(5, 3, torch.float64)
    layer = ours(stock, dtype=torch.float64)
    for parameter in layer.parameters():
        parameter.requires_grad_(rank != 1)
    whole = torch.cat(xs).requires_grad_()
    truth = stock(whole)
    dy = torch.randn_like(truth)
    truth.backward(dy)
    x = xs[rank].detach()
    if rank != 1:
        x.requires_grad_()
    y = layer(x)
    y.backward(dy[3 * rank :][:3])
    if rank != 1:
        near(x.grad, whole.grad[3 * rank :][:3], 1e-10)


@check(True, False)
def checkpointed(reentrant):
    xs = shares(equal_sizes(), (5, 4))
    rank = dist.get_rank()
    stock = single(5, 3, torch.float64)
    layer = ours(stock, dtype=torch.float64)
    whole = torch.cat(xs).requires_grad_()
    truth = stock(whole)
    dy = torch.randn_like(truth)
    truth.backward(dy)
    x = xs[rank].detach().requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy[3 * rank :][:3])
    near(x.grad, whole.grad[3 * rank :][:3], 1e-10)
    near(total(layer.weight.grad), stock.weight.grad, 1e-10)


@check()
def without_gradients_in_training_mode():
    xs = shares(equal_sizes(), (5, 4))
    stock = single(5, 3, torch.float64)
    layer = ours(stock, dtype=torch.float64)
    with torch.no_grad():
        y, truth = layer(xs[dist.get_rank()]), stock(torch.cat(xs))
    near(y, truth[3 * dist.get_rank() :][:3], 1e-10)
    near(layer.running_mean, stock.running_mean, 1e-10)


@check()
def evaluation_mode_exchanges_nothing():
    stock = single(5, 3, torch.float64).eval()
    layer = ours(stock, dtype=torch.float64).eval()
    if dist.get_rank() == 0:  # alone: nobody is waited for
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        near(layer(x), stock(x), 1e-12)


@check()
def batch_statistics_in_evaluation_mode():
    xs = shares(equal_sizes(), (5, 4))
    layer = bn.SyncBatchNorm(5, statistics="batch", dtype=torch.float64).eval()
    truth = nn.functional.batch_norm(torch.cat(xs), None, None, training=True)
    near(layer(xs[dist.get_rank()]).detach(), truth[3 * dist.get_rank() :][:3], 1e-10)
    assert torch.equal(layer.running_mean, torch.zeros(5, dtype=torch.float64))


@check()
def running_statistics_that_are_updated():
    xs = shares(equal_sizes(), (5, 4))
    layer = bn.SyncBatchNorm(5, statistics="running", update=True, dtype=torch.float64, affine=False)
    y = layer(xs[dist.get_rank()])
    near(y, xs[dist.get_rank()] / (1 + 1e-5) ** 0.5, 1e-12)
    near(layer.running_mean, 0.1 * torch.cat(xs).mean((0, 2)), 1e-10)
    near(layer.running_var, 0.9 + 0.1 * torch.cat(xs).var((0, 2)), 1e-10)


@check()
def no_affine_no_tracking_no_momentum():
    xs = shares(equal_sizes(), (5, 4))
    rank = dist.get_rank()
    for arguments in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}):
        stock = single(5, 3, torch.float64, **arguments)
        layer = ours(stock, dtype=torch.float64)
        for _ in range(3):
            truth = stock(torch.cat(xs))
            near(layer(xs[rank]).detach(), truth.detach()[3 * rank :][:3], 1e-10)
        if stock.running_var is not None:
            near(layer.running_var, stock.running_var, 1e-10)


@check("reject", "raise")
def one_rank_has_nan(policy):
    layer = bn.SyncBatchNorm(4, nonfinite=policy)
    x = torch.randn(4, 4, 3)
    if dist.get_rank() == 1:
        x[0, 2, 0] = float("nan")
    if policy == "raise":
        assert "NaN" in raised(lambda: layer(x))
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(x)
        assert any("NaN" in str(w.message) for w in caught)
    assert torch.equal(layer.running_mean, torch.zeros(4))
    assert torch.equal(layer.running_var, torch.ones(4))
    assert int(layer.num_batches_tracked) == 0


@check(*[(k, a, who) for k in KERNELS for a in (None, "silu") for who in ("all", "one empty")])
def second_derivatives(kernel, activation, who):
    """A gradient penalty: the derivative of a function of dx."""
    with on_kernel(kernel):
        dtype = torch.float64 if kernel == "torch" else torch.float32
        sizes = equal_sizes(4)
        if who == "one empty":
            sizes[-1] = 0
        xs = shares(sizes, (16, 2, 2), dtype)
        rank = dist.get_rank()
        stock = single(16, 4, dtype)
        layer = ours(stock, dtype=dtype, activation=activation)
        stock = stock.double()
        whole = torch.cat(xs).double().requires_grad_()
        dy = torch.randn_like(whole)

        def penalty(y, x, dy):
            (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
            return dx.pow(3).sum()

        truth = stock(whole)
        truth = nn.functional.silu(truth) if activation else truth
        penalty(truth, whole, dy).backward()
        x = xs[rank].detach().requires_grad_()
        part = slice(4 * rank, 4 * rank + sizes[rank])
        penalty(layer(x), x, dy[part].to(dtype)).backward()
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        near(x.grad, whole.grad[part], tolerance)
        near(total(layer.weight.grad), stock.weight.grad, tolerance)


@check()
def compiled():
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
    xs = shares(equal_sizes(), (5, 4))
    rank = dist.get_rank()
    stock = single(5, 3, torch.float64)
    layer = ours(stock, dtype=torch.float64)
    fast = torch.compile(nn.Sequential(nn.Tanh(), layer, nn.Tanh()), backend="eager")
    whole, x = torch.cat(xs).requires_grad_(), xs[rank].detach().requires_grad_()
    truth, y = torch.tanh(stock(torch.tanh(whole))), fast(x)
    truth.sum().backward()
    y.sum().backward()
    near(y.detach(), truth.detach()[3 * rank :][:3], 1e-10)
    near(x.grad, whole.grad[3 * rank :][:3], 1e-9)
    near(layer.running_var, stock.running_var, 1e-10)


# ---- converted layers -----------------------------------------------------------------------------------


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
def converted_network_of_the_race():
    from batchnorm.lab.networks.inception import Inception, torch_norm

    model = Inception([0], norm=torch_norm).double()
    synced, report = bn.convert(model, "sync")
    assert len(report.changes) == 21
    rank = dist.get_rank()
    xs = shares(equal_sizes(), (1, 8, 8))
    whole = model(torch.cat(xs))
    near(synced(xs[rank]).detach(), whole.detach()[3 * rank :][:3], 1e-9)
    back, _ = bn.convert(synced, "batch")
    near(back(torch.cat(xs)).detach(), whole.detach(), 1e-9)


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
    told = raised(lambda: model[name](torch.randn(4, 4, 3)))
    told_by_all(told, f"'{name}' (SyncBatchNorm1d, 4 channels): step 1 (forward)", "rank 1 is in")


# ---- ranks that are not at the same place: found out by the exchange, on every rank, and the group stays usable ---


def raised(function):
    try:
        function()
    except bn.BatchNormError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def told_by_all(told, *parts):
    for part in parts:
        assert part in told, told


@check(4, 7)
def another_layer(channels):
    """Rank 1 skips a layer and goes on to the next one, with as many channels or with others."""
    model = nn.ModuleDict({"one": bn.SyncBatchNorm(4), "two": bn.SyncBatchNorm(channels)})
    x = {"one": torch.randn(4, 4, 3), "two": torch.randn(4, channels, 3)}
    for name, layer in model.items():
        layer(x[name])
    name = "two" if dist.get_rank() == 1 else "one"
    told = raised(lambda: model[name](x[name]))
    told_by_all(told, f"'{name}' (SyncBatchNorm", "step 2 (forward)", "rank 1 is in 'two' (SyncBatchNorm", "in 'one'")
    compare(shares(equal_sizes(), (16, 5, 7)), torch.float64)  # the group is sound


@check()
def another_layer_at_first_sight():
    """A layer that rank 0 has not seen yet is not mistaken for the one it is in."""
    known, new = bn.SyncBatchNorm(4), bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3)
    known(x)
    told = raised(lambda: (new if dist.get_rank() == 1 else known)(x))
    told_by_all(told, "rank 1 is in", "not at the same place")


@check()
def another_direction():
    """Rank 1 runs a second forward pass where the others run backward."""
    layer = bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3, requires_grad=True)
    y = layer(x)
    told = raised((lambda: layer(x)) if dist.get_rank() == 1 else (lambda: y.sum().backward()))
    told_by_all(told, "step 2 (forward)", "step 1 (backward)", "rank 1 is")


@check()
def another_mode():
    layer = bn.SyncBatchNorm(4, statistics="batch")
    x = torch.randn(4, 4, 3)
    layer.train(dist.get_rank() != 1)
    told = raised(lambda: layer(x))
    told_by_all(told, "rank 1 is in", "in evaluation mode", "in training mode")


@check()
def another_update():
    layer = bn.SyncBatchNorm(4, update=dist.get_rank() != 1)
    told = raised(lambda: layer(torch.randn(4, 4, 3)))
    told_by_all(told, "rank 1 is in", "without updating its running statistics")


@check()
def another_gradient_mode():
    layer = bn.SyncBatchNorm(4)
    x = torch.randn(4, 4, 3, requires_grad=True)
    with torch.no_grad() if dist.get_rank() == 1 else nullcontext():
        told = raised(lambda: layer(x))
    told_by_all(told, "rank 1 computes no gradients", "step 1 (forward)")


@check()
def an_input_of_other_channels_is_refused_before_the_exchange():
    layer = bn.SyncBatchNorm(4)
    assert "expected an input of 4 channels" in raised(lambda: layer(torch.randn(2, 3)))
    assert "expected an input of 4 channels" in raised(lambda: layer(torch.randn(4)))
    layer(torch.randn(2, 4))


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                function()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    pathlib.Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(sys.argv[1])
