"""Outputs, gradients and running statistics of several ranks are those of one process with the whole batch."""

import numpy as np
import torch
import torch.distributed as dist
from rank_checks import (
    FLOATS,
    KERNELS,
    TOLERANCE,
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

import batchnorm as bn
from batchnorm import reference


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
    message = raised(lambda: layer(x))
    assert "more than 1 value per channel" in message
    assert torch.equal(layer.running_mean, torch.zeros(5))


@check()
def one_value_in_all_by_the_running_statistics():
    """Every rank learns from the exchange that there is one value; a rank with one value of many does not stay away."""
    layer = bn.SyncBatchNorm(5, one_value="running")
    x = torch.full((1 if dist.get_rank() == 0 else 0, 5), 3.0, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    near(y.detach(), x.detach() / (1 + 1e-5) ** 0.5, 1e-6)
    assert int(layer.num_batches_tracked) == 0
    whole = torch.arange(dist.get_world_size(), dtype=torch.float32)[:, None].expand(-1, 5)
    y = layer(whole[dist.get_rank() :][:1])
    near(y.detach(), nn.functional.batch_norm(whole, None, None, training=True)[dist.get_rank() :][:1], 1e-5)
    assert int(layer.num_batches_tracked) == 1


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
