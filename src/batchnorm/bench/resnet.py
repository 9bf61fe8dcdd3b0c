"""A ResNet-18 for 32x32 images of torch.nn's own layers, as the network whose training step is measured."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions with BN, and the way around them.

    >>> import torch
    >>> BasicBlock(4, 8, 2)(torch.randn(2, 4, 6, 6)).shape
    torch.Size([2, 8, 3, 3])
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y = self.relu(y + self.shortcut(x))
        return y


def resnet18(classes: int = 10, width: int = 64) -> nn.Sequential:
    """Return a ResNet-18 with a 3x3 stem and no pooling behind it; ``width`` is the channels of its first stage.

    >>> sum(isinstance(m, nn.BatchNorm2d) for m in resnet18(width=8).modules())
    20
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
