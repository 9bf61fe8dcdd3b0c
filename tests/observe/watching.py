"""Small networks and a plain loop for the tests of what looks on."""

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


class Functional(nn.Module):
    """Activations as functions, one layer used twice, and one in place."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu_(self.first(x))
        x = torch.tanh(self.again(x))
        x = torch.tanh(self.again(x))
        return self.last(x)


def convolutional(norm=nn.BatchNorm2d):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 6, 3), norm(6), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def stack(norm=True):
    layers = []
    for _ in range(2):
        layers += [nn.Linear(6, 6), bn.BatchNorm1d(6) if norm else nn.Identity(), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def batches(count, shape=(8, 6), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator), torch.randint(3, shape[:1], generator=generator))
            for _ in range(count)]  # fmt: skip


def train(model, optimizer, data, after=lambda loss: None):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        after(loss)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def of(records, quantity, layer=None):
    return [m for m in records.measurements if m.quantity == quantity and layer in (None, m.setting["layer"])]


def hooks_of(model):
    return sum(len(getattr(m, name)) for m in model.modules() for name in vars(m) if "_hooks" in name)


def watched(model, steps=1, shape=(8, 6), **options):
    with bn.watch(model, **options) as seen:
        train(model, sgd(model), batches(steps, shape))
    return seen


def layers_of(seen, quantity="mean"):
    return [m.setting["layer"] for m in of(seen.records, quantity) if m.setting["step"] == 0]
