"""BN503, after ultralytics#25364: a fold that scales the wrong axis of a transposed convolution, and other slips."""

import copy

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import batchnorm as bn
from zoo import perturb


def upsampler(groups=1):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2, groups=groups), nn.BatchNorm2d(4), nn.ReLU(),
    )  # fmt: skip
    return perturb(model).eval()


@torch.no_grad()
def folded(model, at, axis=0, eps=None, shift=True):
    """Fold the BN layer behind ``at`` into it by hand: right if the axis is that of the outputs."""
    model = copy.deepcopy(model)
    layer, norm = model[at], model[at + 1]
    scale = norm.weight * (norm.running_var + (norm.eps if eps is None else eps)).rsqrt()
    shape = [1] * layer.weight.dim()
    shape[axis] = -1
    layer.weight.mul_(scale.view(shape))
    layer.bias.copy_((layer.bias - norm.running_mean) * scale + norm.bias if shift else layer.bias)
    model[at + 1] = nn.Identity()
    return model


def case(before, after, shape=(2, 3, 6, 6)):
    return {"model": after, "before": before, "example": torch.randn(shape)}


def classifier():
    return perturb(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))).eval()


def with_relu():
    """torch.ao's way: the activation goes into the convolution, too."""
    model = upsampler()
    fused = copy.deepcopy(model)
    fused[0] = torch.ao.nn.intrinsic.ConvReLU2d(fuse_conv_bn_eval(fused[0], fused[1]), nn.ReLU())
    fused[1] = fused[2] = nn.Identity()
    return case(model, fused)


def pruned():
    model = upsampler()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0] = 0
    return case(model, other)


SICK = {
    "the wrong axis of a transposed convolution": lambda: case(model := upsampler(), folded(model, 3)),
    "the wrong axis of a linear layer": lambda: case(model := classifier(), folded(model, 0, axis=1), (8, 6)),
    "no shift": lambda: case(model := upsampler(), folded(model, 0, shift=False)),
    "another eps": lambda: case(model := upsampler(), folded(model, 0, eps=0.1)),
    "simply removed": lambda: case(model := upsampler(), nn.Sequential(*[model[i] for i in (0, 2, 3, 4, 5)])),
}
HEALTHY = {
    "by hand": lambda: case(model := upsampler(), folded(folded(model, 0), 3, axis=1)),
    "by ours": lambda: case(model := upsampler(groups=2), bn.fold(model, torch.randn(2, 3, 6, 6))[0]),
    "into what follows": lambda: case(
        model := perturb(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2))).eval(),
        bn.fold(model, torch.randn(2, 6))[0], (8, 6),
    ),
    "with its activation": with_relu,
    "nothing was folded": pruned,
    "the same model": lambda: case(model := upsampler(), model),
}  # fmt: skip
