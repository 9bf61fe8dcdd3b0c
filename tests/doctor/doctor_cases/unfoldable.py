"""BN502, after pytorch/pytorch#104593: a convolution whose output two BN layers read, and other ways to be left."""

import torch
from torch import nn

from zoo import perturb


class Shared(nn.Module):
    """One convolution, two BN layers: as a detection head does for each level of its pyramid."""

    def __init__(self, copies=False):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2 if copies else 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, x):
        return [norm(self.convs[i % len(self.convs)](x)) for i, norm in enumerate(self.norms)]


def case(*layers, shape=(2, 3, 8, 8), training=False, **more):
    return {"model": perturb(nn.Sequential(*layers)).train(training), "example": torch.randn(shape), **more}


class Activated(nn.BatchNorm2d):
    """BN with its activation inside, as timm has it: torch's fusion forgets the activation."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


def before_padding():
    return nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1)


SICK = {
    "an activation on both sides": lambda: case(nn.Conv2d(3, 3, 3), nn.ReLU(), *before_padding()),
    "no running statistics": lambda: case(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
    "to be exported": lambda: case(*before_padding(), training=True, purpose="export"),
    "a class that does more, to be exported": lambda: case(nn.Conv2d(3, 4, 3), Activated(4), purpose="export"),
    "a grouped transposed convolution": lambda: case(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6),
                                                     shape=(2, 4, 5, 5)),
}  # fmt: skip
HEALTHY = {
    "a convolution before it": lambda: case(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
    "a class that does more": lambda: case(nn.Conv2d(3, 4, 3), Activated(4)),
    "a linear layer before it": lambda: case(nn.Linear(3, 4), nn.BatchNorm1d(4), shape=(8, 3)),
    "a transposed convolution": lambda: case(nn.ConvTranspose2d(3, 6, 2), nn.BatchNorm2d(6)),
    "a shared convolution, which is cloned": lambda: {
        "model": perturb(Shared()).eval(),
        "example": torch.randn(2, 3, 8, 8),
    },
    "a copy for each": lambda: {"model": perturb(Shared(copies=True)).eval(), "example": torch.randn(2, 3, 8, 8)},
    "in training": lambda: case(*before_padding(), training=True),
    "no BN": lambda: case(nn.ReLU()),
}
