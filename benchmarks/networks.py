"""A ResNet-18 for small images, the same with BN first, and a MobileNetV2, as people write them: plain code.

And what the benchmarks do to them: a training step, and the same network without its BN layers.
"""

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The variant for 32x32 inputs: a 3x3 stem and no pooling after it; ``width`` is the first stage's channels."""

    def __init__(self, classes=10, width=64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        stages, inputs = [], width
        for index in range(4):
            outputs = width << index
            stages.append(
                nn.Sequential(BasicBlock(inputs, outputs, 1 if index == 0 else 2), BasicBlock(outputs, outputs, 1))
            )
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.pool(self.stages(x)).flatten(1))


class PreActivationBlock(nn.Module):
    """BN and ReLU stand before the convolutions: what the first BN reads is added at the end, so it cannot go."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = self.relu(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(out)
        return self.conv2(self.relu(self.bn2(self.conv1(out)))) + identity


class PreActResNet18(nn.Module):
    def __init__(self, classes=10, width=64):
        super().__init__()
        layers, inputs = [nn.Conv2d(3, width, 3, 1, 1, bias=False)], width
        for index in range(4):
            outputs = width << index
            layers += [PreActivationBlock(inputs, outputs, 1 if index == 0 else 2)]
            layers += [PreActivationBlock(outputs, outputs, 1)]
            inputs = outputs
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def conv_bn_relu6(inputs, outputs, kernel=3, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        hidden = inputs * expand
        layers = [] if expand == 1 else [conv_bn_relu6(inputs, hidden, 1)]
        layers += [
            conv_bn_relu6(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.conv(x) if self.shortcut else self.conv(x)


STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MobileNetV2(nn.Module):
    """The paper's network; ``stages`` are (expansion, channels, blocks, stride) each."""

    def __init__(self, classes=10, stages=STAGES, first=32, last=1280):
        super().__init__()
        layers, inputs = [conv_bn_relu6(3, first, stride=2)], first
        for expand, outputs, blocks, stride in stages:
            for index in range(blocks):
                layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expand))
                inputs = outputs
        layers.append(conv_bn_relu6(inputs, last, 1))
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(last, classes)

    def forward(self, x):
        return self.classifier(self.dropout(self.features(x).mean((2, 3))))


def without_norms(model):
    """The same network with nothing in the place of its BN layers: what a BN layer that cost nothing would leave."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, nn.Identity())
    return model


def training_step(model, x, target):
    """A step of the model with SGD, as a function."""
    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step():
        sgd.zero_grad()
        F.cross_entropy(model(x), target).backward()
        sgd.step()

    return step
