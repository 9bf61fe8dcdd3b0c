"""BN103, after pytorch/pytorch#20967, #37823, #44415 and #156051: flags that were set after a layer was built."""

import torch
from torch import nn

import batchnorm as bn


def case(layer, example=True, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU())
    return {"model": model, "example": torch.randn(4, 3, 6, 6) if example else None}


def flat(layer, rows=6):
    return {"model": nn.Sequential(nn.Linear(3, 4), layer), "example": torch.randn(rows, 3)}


def learnt(layer):
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


SICK = {
    "tracking turned off later": lambda: case(nn.BatchNorm2d(4), track_running_stats=False),
    "and without an example": lambda: case(nn.BatchNorm2d(4), example=False, track_running_stats=False),
    "of ours": lambda: case(bn.BatchNorm2d(4, activation="relu"), track_running_stats=False),
    "of a subclass": lambda: case(OwnForward(4), track_running_stats=False),
    "no buffers": lambda: case(nn.BatchNorm2d(4), running_mean=None, running_var=None),
    "one buffer": lambda: case(nn.BatchNorm2d(4), example=False, running_var=None),
    "tracking turned on later": lambda: case(nn.BatchNorm2d(4, track_running_stats=False), track_running_stats=True),
    "instance norm": lambda: case(nn.InstanceNorm2d(4), example=False, track_running_stats=True),
    "a switch without statistics": lambda: case(
        bn.BatchNorm2d(4, track_running_stats=False, statistics="running"), example=False
    ),
    "an update of nothing": lambda: case(bn.BatchNorm2d(4, track_running_stats=False, update=True)),
    "momentum 0": lambda: case(nn.BatchNorm2d(4, momentum=0.0)),
    "momentum 0 after training": lambda: case(learnt(nn.BatchNorm2d(4, momentum=0.0))),
    "one example alone raises": lambda: flat(nn.BatchNorm1d(4, track_running_stats=False)),
}
NO_FIX = ("of a subclass", "one buffer", "a switch without statistics", "one example alone raises")
HEALTHY = {
    "as built": lambda: case(nn.BatchNorm2d(4)),
    "in evaluation": lambda: case(learnt(nn.BatchNorm2d(4)).eval()),
    "built without statistics, on maps": lambda: case(nn.BatchNorm2d(4, track_running_stats=False)),
    "tracking and buffers taken away together": lambda: case(
        nn.BatchNorm2d(4), track_running_stats=False, running_mean=None, running_var=None
    ),
    "a switch": lambda: case(bn.BatchNorm2d(4, update=False)),
    "a switch and the flag": lambda: case(bn.BatchNorm2d(4, update=False), track_running_stats=False),
    "frozen": lambda: case(bn.FrozenBatchNorm(4)),
    "the batch's, on purpose": lambda: flat(bn.BatchNorm1d(4, track_running_stats=False, statistics="batch")),
    "a cumulative average": lambda: case(nn.BatchNorm2d(4, momentum=None)),
    "instance norm": lambda: case(nn.InstanceNorm2d(4)),
    "instance norm that tracks": lambda: case(nn.InstanceNorm2d(4, track_running_stats=True)),
    "no norm": lambda: case(nn.Identity()),
}
