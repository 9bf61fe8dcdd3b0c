"""BN307, after section 2 of the paper: deep sigmoid networks, too large and too small weights, and ReLUs that died."""

import torch
from torch import nn
from torch.nn import functional as F


def stack(activation=nn.Sigmoid, depth=6, std=None, width=32):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), activation()]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    if std is not None:
        for layer in model[:-1]:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=std)
    return model


def given(model, *shape):
    return {"model": model, "example": torch.randn(shape or (32, 32))}


def dead():
    model = stack(nn.ReLU, depth=2)
    nn.init.constant_(model[2].bias, -50.0)
    return model


def sparse():
    """Each of 256 units fires for one input in 200, as in a sparse code: none is dead."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
    with torch.no_grad():
        model[0].bias.zero_()
        model[0].bias -= model[0](torch.randn(4000, 32)).quantile(0.995, 0)
    return model


class Functional(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 2)
        for layer in (self.one, self.two):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.one(x)), 2)
        return self.three(F.adaptive_avg_pool2d(self.two(x).tanh(), 1).flatten(1))


class Gate(nn.Module):
    """Squeeze and excitation, whose gates are sure of themselves; and a confident output."""

    def __init__(self):
        super().__init__()
        self.conv, self.squeeze, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 1)
        self.gate, self.out = nn.Sigmoid(), nn.Sigmoid()
        nn.init.constant_(self.squeeze.bias, 20.0)
        nn.init.constant_(self.head.bias, -20.0)

    def forward(self, x):
        x = self.conv(x).relu()
        x = x * self.gate(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        return self.out(self.head(x.mean((2, 3))))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[
            part for _ in range(6) for part in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.Sigmoid())
        ])  # fmt: skip
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


def train(monitor, model, steps=3, batches=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for x in torch.randn(steps, 32, 32) if batches is None else batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def pooled():
    """The nonlinearity reaches the next layer through pooling, dropout and a view."""
    model = nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip
    nn.init.normal_(model[1].weight, std=20.0)
    return model


SICK = {
    "weights too large": lambda: given(stack(std=4.0)),
    "weights too small": lambda: given(stack(std=0.01)),
    "a deep sigmoid stack as torch begins it": lambda: given(stack(depth=8)),
    "tanh": lambda: given(stack(nn.Tanh, std=4.0)),
    "functions": lambda: given(Functional(8.0), 8, 3, 12, 12),
    "dead": lambda: given(dead()),
    "data": lambda: {"model": stack(std=4.0), "data": [(x, torch.zeros(32)) for x in torch.randn(3, 32, 32)]},
}
HEALTHY = {
    "shallow": lambda: given(stack(depth=2)),
    "tanh as torch begins it": lambda: given(stack(nn.Tanh, depth=6)),
    "ReLU": lambda: given(stack(nn.ReLU, depth=6)),
    "normalised": lambda: given(Normalised()),
    "functions": lambda: given(Functional(0.2), 8, 3, 12, 12),
    "gates and outputs": lambda: given(Gate(), 8, 3, 8, 8),
    "one example, over and over": lambda: {"model": stack(), "example": torch.ones(32, 32)},
    "one example": lambda: given(stack(), 1, 32),
    "a sparse code, 16 examples": lambda: given(sparse(), 16, 32),
    "a sparse code, many examples": lambda: given(sparse(), 4000, 32),
    "dead for a few": lambda: given(dead(), 4, 32),
}
SICK_RUNS = {
    "weights too large": lambda monitor: train(monitor, stack(std=4.0)),
    "a deep sigmoid stack as torch begins it": lambda monitor: train(monitor, stack(depth=8)),
    "dead": lambda monitor: train(monitor, dead()),
    "through other modules": lambda monitor: train(monitor, pooled()),
}
HEALTHY_RUNS = {
    "normalised": lambda monitor: train(monitor, Normalised()),
    "ReLU": lambda monitor: train(monitor, stack(nn.ReLU)),
    "gates and outputs": lambda monitor: train(monitor, Gate(), batches=torch.randn(3, 8, 3, 8, 8)),
    "one example, over and over": lambda monitor: train(monitor, stack(depth=8), batches=torch.ones(3, 32, 32)),
}
