"""A small residual network learns along the same curve, whichever layer it is built from."""

import pytest
import torch
from torch import nn

import batchnorm as bn


class Block(nn.Module):
    def __init__(self, norm, fused):
        super().__init__()
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(16), norm(16)
        self.fused = fused

    def forward(self, x):
        if self.fused:
            return self.norm2(self.conv2(self.norm1(self.conv1(x))), residual=x)
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


class Network(nn.Module):
    def __init__(self, norm, fused):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.blocks = nn.Sequential(Block(norm, fused), Block(norm, fused))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def learning_curve(norm, fused, last):
    """Twenty losses in training, and one in evaluation."""
    torch.manual_seed(1)
    network, x, labels = Network(norm, fused), torch.randn(12, 3, 10, 10), torch.randint(5, (12,))
    if last:
        network, x = network.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.2)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(network(x), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    losses.append(nn.functional.cross_entropy(network.eval()(x), labels).item())
    return torch.tensor(losses)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_same_losses(last, fused, path):
    expected = learning_curve(nn.BatchNorm2d, False, last)
    ours = learning_curve(lambda c: bn.BatchNorm2d(c, activation="relu" if fused else None), fused, last)
    assert expected[19] < 0.5 * expected[0]
    torch.testing.assert_close(ours[:5], expected[:5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-4)
