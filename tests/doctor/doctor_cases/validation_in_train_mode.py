"""BN301, after the threads on stacked hourglass networks: a validation loop that forgets model.eval()."""

import torch
import torch.utils.checkpoint
from torch import nn

import batchnorm as bn


def loop(monitor, validate):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for _ in range(2):
            for x in torch.randn(3, 8, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                validate(model, torch.randn(8, 3))


def forgets(model, x):
    model(x)


def remembers(model, x):
    model.eval()
    model(x)
    model.train()


def keeps(model, x):
    with bn.no_update(model):
        model(x)


def only_measures(monitor):
    """A pass over the data without gradients, and no training: somebody measures statistics."""
    model = nn.BatchNorm1d(3)
    with monitor(model), torch.no_grad():
        for x in torch.randn(3, 8, 3):
            model(x)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def update_bn(monitor):
    """Measures the statistics anew at the end, over more batches than it trained on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(3, 8, 3):
            model(x).square().mean().backward()
            optimizer.step()
        torch.optim.swa_utils.update_bn(list(torch.randn(9, 8, 3)), model)


def in_every_step(monitor):
    """A GAN's generator, which makes images without gradients for every step of the discriminator."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(4, 8, 3):
            model(x).square().mean().backward()
            for _ in range(2):
                with torch.no_grad():
                    model(x)
            optimizer.step()


class PartlyCheckpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant=True))


def train(monitor, model, call=lambda model, x: model(x)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(4, 8, 3):
            call(model, x).sum().backward()
            optimizer.step()


def wholly_checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)


def checkpointed_once(monitor):
    """One call in the middle within a reentrant checkpoint."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for step, x in enumerate(torch.randn(6, 8, 3)):
            (wholly_checkpointed(model, x) if step == 3 else model(x)).sum().backward()
            optimizer.step()


def sanity_check(monitor):
    """One pass before the training, which moved the statistics, and a second one in the middle, which is the bug."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model):
        for step, x in enumerate(torch.randn(6, 8, 3)):
            if step in (0, 4):
                with torch.no_grad():
                    model(x)
            model(x).square().mean().backward()
            optimizer.step()


SICK_RUNS = {"no eval()": lambda monitor: loop(monitor, forgets), "an optimiser that was not given": sanity_check}
HEALTHY_RUNS = {
    "eval()": lambda monitor: loop(monitor, remembers),
    "no_update": lambda monitor: loop(monitor, keeps),
    "a calibration": only_measures,
    "update_bn": update_bn,
    "in every step": in_every_step,
    "a checkpoint in it": lambda monitor: train(monitor, PartlyCheckpointed()),
    "a checkpoint around it, once": checkpointed_once,
    "a checkpoint around it": lambda monitor: train(monitor, network(), wholly_checkpointed),
}
