"""Verbs on whole models whose layers share their statistics with other ranks."""

import torch
import torch.distributed as dist
from rank_checks import check, near, shares

import batchnorm as bn
from batchnorm.reference import merged_statistics


def stream(sizes):
    """Micro-batches of every rank, the same on every rank, and of no two alike."""
    return [[part + 3 * rank for part in shares(sizes, (4, 3))] for rank in range(dist.get_world_size())]


def whole(batches):
    mean, var = merged_statistics([part.numpy() for rank in batches for part in rank])
    count = sum(part.numel() // part.shape[1] for rank in batches for part in rank)
    return torch.from_numpy(mean), torch.from_numpy(var), count


@check()
def accumulated_statistics_are_those_of_all_ranks():
    batches = stream([3, 5, 2])
    layer = bn.SyncBatchNorm(4, momentum=1.0, dtype=torch.float64)
    with bn.accumulate(layer):
        for part in batches[dist.get_rank()]:
            layer(part)
    mean, var, count = whole(batches)
    near(layer.running_mean, mean, 1e-10)
    near(layer.running_var, var * count / (count - 1), 1e-10)
    assert int(layer.num_batches_tracked) == 1


@check(0.0, 24.0)
def adapted_statistics_are_those_of_all_ranks(prior):
    batches = stream([3, 5, 2])
    layer = bn.SyncBatchNorm(4, dtype=torch.float64).eval()
    adapted, handle = bn.adapt(layer, batches[dist.get_rank()], prior=prior)
    mean, var, _ = whole(batches)
    examples = sum(len(part) for rank in batches for part in rank)
    share = examples / (examples + prior)
    near(adapted.running_mean, mean * share, 1e-10)
    near(adapted.running_var, var * share + (1 - share), 1e-10)
    assert handle.restore().running_mean.abs().max() == 0
