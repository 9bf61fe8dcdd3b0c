"""BN107, after pytorch/pytorch#187298: torch's conversion took the activation out of a network's BN layers."""

import copy

import torch
from torch import nn

import batchnorm as bn


class NormAct(nn.BatchNorm2d):
    """Norm, dropout and activation in one, as timm's."""

    def __init__(self, channels, act=nn.ReLU):
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Scaled(nn.BatchNorm2d):
    """No submodules: without the model before, nothing tells of the loss."""

    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.BatchNorm2d):
    """A subclass that does nothing else."""


def network(norm):
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm(4), nn.Conv2d(4, 4, 3, bias=False), norm(4))


def learnt(model):
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
    return model


def converted(norm, before=True, example=True, by=nn.SyncBatchNorm.convert_sync_batchnorm):
    old = network(norm)
    new = learnt(by(copy.deepcopy(old)))  # trained since
    case = {"model": new, "example": torch.randn(2, 3, 8, 8) if example else None}
    return {**case, "before": old} if before else case


def ours(model):
    return bn.convert(model, "sync")[0]


def half_synchronised():
    model = network(NormAct)
    model[1] = nn.SyncBatchNorm(4)
    return {"model": model}


SICK = {
    "an activation": lambda: converted(NormAct),
    "and no example": lambda: converted(NormAct, example=False),
    "nothing left to see": lambda: converted(Scaled),
    "of ours": lambda: converted(lambda c: bn.BatchNorm2d(c, activation="relu")),
    "ghost batches": lambda: converted(lambda c: bn.GhostBatchNorm(c)),
    "without the model before": lambda: converted(NormAct, before=False),
    "not yet converted": half_synchronised,
}
NO_FIX = ("without the model before", "not yet converted")
HEALTHY = {
    "plain layers": lambda: converted(nn.BatchNorm2d),
    "a subclass in name": lambda: converted(Renamed),
    "converted by ours": lambda: converted(NormAct, by=ours),
    "nothing is inside": lambda: converted(lambda c: NormAct(c, nn.Identity), before=False),
    "not converted": lambda: {"model": network(NormAct)},
    "trained since": lambda: {"model": learnt(network(NormAct)), "before": network(NormAct)},
    "folded": lambda: {"model": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity()), "before": network(NormAct)[:2]},
    "more channels": lambda: {"model": nn.Sequential(nn.SyncBatchNorm(3)), "before": nn.Sequential(NormAct(4))},
}
