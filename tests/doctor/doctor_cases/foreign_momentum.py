"""BN104, after pytorch/vision#8250: MaxViT's BN layers had TensorFlow's momentum of 0.99, which is torch's 0.01."""

import torch
from torch import nn

import batchnorm as bn


def case(*layers):
    return {"model": nn.Sequential(*layers), "example": torch.randn(4, 3, 5, 5)}


def frozen():
    return case(bn.freeze(nn.Sequential(nn.BatchNorm2d(3, momentum=0.99)))[0][0])


SICK = {
    "MaxViT": lambda: case(nn.BatchNorm2d(3, eps=1e-3, momentum=0.99)),
    "one of two": lambda: case(nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.9)),
    "not surely Keras's": lambda: case(nn.BatchNorm2d(3, momentum=0.6)),
    "the last batch": lambda: case(nn.BatchNorm2d(3, momentum=1.0)),
    "above one": lambda: case(nn.BatchNorm2d(3, momentum=1.5)),
    "below zero": lambda: case(nn.BatchNorm2d(3, momentum=-0.1)),
    "a momentum in eps's place": lambda: case(nn.BatchNorm2d(3, 0.8)),
    "no eps": lambda: case(nn.BatchNorm2d(3, eps=0.0)),
    "a negative eps": lambda: {"model": nn.BatchNorm2d(3, eps=-1e-5)},
}
NO_FIX = ("the last batch", "above one", "below zero", "a momentum in eps's place", "no eps", "a negative eps")
HEALTHY = {
    "torch's": lambda: case(nn.BatchNorm2d(3)),
    "Keras's, rightly": lambda: case(nn.BatchNorm2d(3, eps=1e-3, momentum=0.01)),
    "an average over all": lambda: case(nn.BatchNorm2d(3, momentum=None)),
    "detection's": lambda: case(nn.BatchNorm2d(3, momentum=0.03)),
    "zero": lambda: case(nn.BatchNorm2d(3, momentum=0.0)),
    "without statistics": lambda: case(nn.BatchNorm2d(3, momentum=0.99, track_running_stats=False)),
    "frozen": frozen,
    "no eps, but frozen": lambda: case(bn.FrozenBatchNorm(3, eps=0.0)),
}
