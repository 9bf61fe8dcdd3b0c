"""Models with norms for the tests of `convert`."""

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


def worn(model):
    """Give the norms of a model statistics, gammas and betas of their own."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                if module.running_mean is not None:
                    module.running_mean.normal_(0, 0.5)
                    module.running_var.uniform_(0.5, 2.0)
                    module.num_batches_tracked.fill_(7)
                if module.weight is not None:
                    module.weight.normal_()
                    module.bias.normal_()
    return model.eval()


def images(samples=8):
    return torch.randn(samples, 3, 6, 6) * 2 + 1


def network():
    return worn(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3, momentum=0.3), nn.ReLU(),
            nn.Conv2d(8, 12, 3), bn.BatchNorm2d(12, activation="leaky_relu", negative_slope=0.2), nn.Flatten(),
            nn.Linear(48, 6), nn.BatchNorm1d(6),
        )
    )  # fmt: skip


class NormAct(nn.BatchNorm2d):
    """As model libraries write it: torch's forward repeated, then dropout and activation."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.5), nn.SiLU()

    def forward(self, x):
        training = self.training or self.running_mean is None
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum, self.eps
        )
        return self.act(self.drop(y))
