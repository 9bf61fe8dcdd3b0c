"""Small networks of every shape that BN layers stand in, written for these tests.

``perturb`` gives them statistics, gammas and betas that are far from 0 and 1, so that a wrong fold shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def perturb(model, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def uniform(like, low, high):
        return (torch.rand(like.shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(like.dtype)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or "running_var" in module._buffers:
                if module.running_mean is not None:
                    module.running_mean.copy_(uniform(module.running_mean, -0.6, 0.6))
                    module.running_var.copy_(uniform(module.running_var, 0.3, 2.0))
                if module.weight is not None:
                    module.weight.copy_(uniform(module.weight, 0.5, 1.5))
                if module.bias is not None:
                    module.bias.copy_(uniform(module.bias, -0.5, 0.5))
    return model


class Run(nn.Module):
    """A model that is one function of itself and its arguments."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def conv(inputs, outputs, size=3, stride=1, groups=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


class Basic(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride=1, groups=1):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, groups), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential(conv(inputs, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class PreActivation(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs)
        self.shortcut = conv(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(x))
        return self.conv2(F.relu(self.bn2(self.conv1(y)))) + self.shortcut(x)


class Inverted(nn.Module):
    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            conv(inputs, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            conv(hidden, hidden, 3, stride, hidden), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            conv(hidden, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, 4 * growth, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), conv(4 * growth, growth)

    def forward(self, features):
        x = torch.cat(features, 1)
        return self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class Dense(nn.Module):
    def __init__(self, inputs, growth, layers):
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{i}": DenseLayer(inputs + i * growth, growth) for i in range(layers)})

    def forward(self, x):
        features = [x]
        for layer in self.layers.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class ConvBN(nn.Sequential):
    def __init__(self, inputs, outputs, size, act=nn.ReLU, stride=1, groups=1):
        layers = [conv(inputs, outputs, size, stride, groups), nn.BatchNorm2d(outputs, eps=1e-3)]
        super().__init__(*layers, *([act()] if act else []))


class Inception(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.branches = nn.ModuleList([
            ConvBN(inputs, 4, 1),
            nn.Sequential(ConvBN(inputs, 4, 1), ConvBN(4, 6, 3)),
            nn.Sequential(ConvBN(inputs, 3, 1), ConvBN(3, 5, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvBN(inputs, 3, 1)),
        ])  # fmt: skip

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


class Shuffle(nn.Module):
    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            ConvBN(half, half, 1), ConvBN(half, half, 3, None, groups=half), ConvBN(half, half, 1)
        )  # fmt: skip

    def forward(self, x):
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, self.branch(changed)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(s))))


class MBConv(nn.Module):
    def __init__(self, channels, expand=4):
        super().__init__()
        hidden = channels * expand
        self.expand = ConvBN(channels, hidden, 1, nn.SiLU)
        self.depthwise = ConvBN(hidden, hidden, 5, nn.SiLU, groups=hidden)
        self.attend = SqueezeExcite(hidden)
        self.project = ConvBN(hidden, channels, 1, None)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, x):
        return x + self.drop(self.project(self.attend(self.depthwise(self.expand(x)))))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(ConvBN(3, 4, 3), ConvBN(4, 4, 3))
        self.down2 = nn.Sequential(ConvBN(4, 8, 3), ConvBN(8, 8, 3))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(4))
        self.end = nn.Sequential(ConvBN(8, 4, 3), nn.Conv2d(4, 2, 1))

    def forward(self, x):
        skip = self.down1(x)
        deep = self.down2(F.max_pool2d(skip, 2))
        return {"mask": self.end(torch.cat([skip, F.relu(self.up(deep))], 1)), "deep": deep}


class Functional(nn.Module):
    """As one writes it in a hurry: functions, +=, a branch on values, one ReLU for everything."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc, self.bn3 = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        if x.mean() > 1e6:  # symbolic tracing stops here
            return self.bn3(self.fc(x.flatten(1)))
        y = self.bn2(self.conv2(x))
        y += x
        y.relu_()
        y = F.dropout(F.adaptive_avg_pool2d(y, 1).flatten(1), 0.5, self.training)
        return self.bn3(F.dropout(self.fc(y), 0.5, self.training))


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(), nn.Linear(8, 3),
    )  # fmt: skip


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(5, 12, 4, 1, 0, bias=False), nn.BatchNorm2d(12), nn.ReLU(True),
        nn.ConvTranspose2d(12, 8, 3, 2, 1, output_padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, dilation=2), nn.Tanh(),
    )  # fmt: skip


def volumes():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(),
        nn.ConvTranspose3d(4, 4, 2, 2, groups=2), nn.BatchNorm3d(4), nn.Conv3d(4, 2, 1, groups=2),
    )  # fmt: skip


def signals():
    return nn.Sequential(
        nn.BatchNorm1d(2), nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.BatchNorm1d(4),
        nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6),
    )  # fmt: skip


def perceptron():
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 16, bias=False), nn.BatchNorm1d(16), nn.Sigmoid(),
        nn.Linear(16, 8), nn.Dropout(), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


def head(features, channels):
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


@dataclass(frozen=True)
class Subject:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    norms: int  # how many BN layers it has
    folds: int  # how many of them can go


IMAGE = (2, 3, 10, 10)
ZOO = {
    "resnet-basic": Subject(lambda: head(nn.Sequential(ConvBN(3, 4, 3), Basic(4, 4), Basic(4, 8, 2)), 8), IMAGE, 6, 6),
    "resnet-bottleneck": Subject(lambda: head(nn.Sequential(ConvBN(3, 4, 3), Bottleneck(4, 3, 2)), 12), IMAGE, 5, 5),
    "resnext": Subject(lambda: head(Bottleneck(3, 4, 2, groups=2), 16), IMAGE, 4, 4),
    # the first BN of each block reads what the block adds later; the second is folded
    "pre-activation": Subject(lambda: head(nn.Sequential(conv(3, 4), PreActivation(4, 4), PreActivation(4, 6, 2)), 6),
                              IMAGE, 4, 2),
    "mobilenet-v2": Subject(lambda: head(nn.Sequential(ConvBN(3, 4, 3, nn.ReLU6), Inverted(4, 4, 1, 3),
                                                       Inverted(4, 6, 2, 3)), 6), IMAGE, 7, 7),
    # what is joined is read by others, too; the last BN goes past the pooling into the linear layer
    "densenet": Subject(lambda: head(nn.Sequential(ConvBN(3, 4, 3), Dense(4, 3, 3), nn.BatchNorm2d(13)), 13),
                        IMAGE, 8, 5),
    "inception": Subject(lambda: head(nn.Sequential(Inception(3), Inception(18)), 18), IMAGE, 12, 12),
    "shufflenet": Subject(lambda: head(nn.Sequential(ConvBN(3, 8, 3), Shuffle(8), Shuffle(8)), 8), IMAGE, 7, 7),
    "unet": Subject(UNet, IMAGE, 6, 6),
    "dcgan": Subject(generator, (2, 5, 1, 1), 2, 2),
    "volumes": Subject(volumes, (2, 2, 4, 4, 4), 2, 2),
    "signals": Subject(signals, (2, 2, 12), 4, 4),
    "vgg": Subject(vgg, IMAGE, 2, 2),
    "perceptron": Subject(perceptron, (6, 5), 4, 4),
    "efficientnet": Subject(lambda: head(nn.Sequential(ConvBN(3, 4, 3, nn.SiLU), MBConv(4), MBConv(4)), 4),
                            IMAGE, 7, 7),
    "functional": Subject(Functional, IMAGE, 3, 3),
}  # fmt: skip
