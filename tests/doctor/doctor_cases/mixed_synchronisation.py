"""BN404: a head that was added after the conversion, and layers that are left plain on purpose."""

import torch
from torch import nn

import batchnorm as bn


def network(first=bn.SyncBatchNorm, second=nn.BatchNorm1d, **options):
    return nn.Sequential(nn.Linear(3, 4), first(4), nn.ReLU(), nn.Linear(4, 4), second(4, **options), nn.Linear(4, 1))


def added_later():
    body = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    return nn.Sequential(body, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def half_frozen():
    model = network()
    model[4].eval()
    return model


def steps(monitor, model, number=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()


def networks(monitor):
    """Two networks of a kind each, which never train in one step."""
    nets = {"G": network(second=bn.SyncBatchNorm), "D": network(first=nn.BatchNorm1d)}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    with monitor(nets, optimizers):
        for _ in range(4):
            for name, net in nets.items():
                optimizers[name].zero_grad()
                net(torch.randn(8, 3)).square().mean().backward()
                optimizers[name].step()


SICK = {
    "added after the conversion": lambda: {"model": added_later()},
    "ours": lambda: {"model": network()},
    "in evaluation mode": lambda: {"model": network().eval()},
    "one of many": lambda: {"model": network(first=bn.BatchNorm1d, second=bn.SyncBatchNorm)},
}
HEALTHY = {
    "all plain": lambda: {"model": network(first=nn.BatchNorm1d)},
    "all synchronised": lambda: {"model": bn.convert(network(), "sync")[0]},
    "the rest is frozen": lambda: {"model": bn.freeze(network(), "4")[0]},
    "the rest is in evaluation mode": lambda: {"model": half_frozen()},
    "the rest keeps no statistics": lambda: {"model": network(track_running_stats=False)},
    "other norms": lambda: {"model": network(second=nn.LayerNorm)},
}
SICK_RUNS = {
    "added after the conversion": lambda monitor: steps(monitor, network()),
    "one of many": lambda monitor: steps(monitor, network(first=bn.BatchNorm1d, second=bn.SyncBatchNorm)),
}
HEALTHY_RUNS = {
    "all synchronised": lambda monitor: steps(monitor, network(second=bn.SyncBatchNorm)),
    "the rest is in evaluation mode": lambda monitor: steps(monitor, half_frozen()),
    "two networks": networks,
}
