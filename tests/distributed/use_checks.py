"""Groups, DistributedDataParallel, checkpointing, modes, second derivatives: the layer as it is used."""

import copy
import pickle
import warnings

import torch
import torch.distributed as dist
from rank_checks import (
    FLOATS,
    KERNELS,
    check,
    compare,
    equal_sizes,
    near,
    on_kernel,
    ours,
    raised,
    shares,
    single,
    total,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.distributed import exchange
from batchnorm.distributed.ledger import ledger_of


@check()
def several_groups():
    """Two halves, each with statistics of its own, beside a layer that all share."""
    size, rank = dist.get_world_size(), dist.get_rank()
    half = size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    index = int(rank >= half)
    assert bn.SyncBatchNorm(3, process_group=groups[index]).process_group is groups[index]
    message = raised(lambda: bn.SyncBatchNorm(3, process_group=groups[1 - index]))
    assert "this process is not in" in message
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


@check(*FLOATS)
def another_backend_than_gloo(dtype):
    """What nccl would be given, one all_gather a direction, carried by gloo: there is no other backend on a CPU."""
    usual = exchange.backend
    exchange.backend = lambda group, device: ("another", device)
    try:
        compare(shares([2 + r for r in range(dist.get_world_size())], (16, 3, 5), dtype), dtype, activation="relu")
        compare(shares(equal_sizes(4), (4100,), dtype), dtype)  # more than one message of gloo's
    finally:
        exchange.backend = usual


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
    if dist.get_rank() == 0:  # alone: no rank is waited for
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
