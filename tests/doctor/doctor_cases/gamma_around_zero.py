"""BN115: DCGAN's ``weights_init`` with one branch too few: gamma is drawn around zero."""

import torch
from torch import nn

import batchnorm as bn


def generator(norm=nn.BatchNorm2d):
    return nn.Sequential(
        nn.ConvTranspose2d(8, 32, 4, bias=False), norm(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), norm(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def initialised(mean=0.0, deviation=0.02, norm=nn.BatchNorm2d, model=None):
    model = generator(norm) if model is None else model

    def init(module):
        if getattr(module, "weight", None) is not None:
            here = mean if isinstance(module, nn.modules.batchnorm._BatchNorm) else 0.0
            nn.init.normal_(module.weight, here, deviation)

    model.apply(init)
    return {"model": model}


def wide():
    return nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), *(nn.BatchNorm1d(48) for _ in range(6)))


def trained(arguments, steps=10, rate=1e-3):
    model = arguments["model"]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 8, 1, 1)) - 0.5).square().mean().backward()
        optimizer.step()
    return {"model": model}


def every_parameter(low=-0.08, high=0.08):
    """As sequence models are initialised."""
    model = generator()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, low, high)
    return {"model": model}


def narrow():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].weight.data = torch.tensor([0.01, -0.02, 0.03, -0.01])
    return {"model": model}


class Residual(nn.Module):
    """Blocks whose last gamma begins at zero, and learns values of both signs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
            )
            for _ in range(3)
        )  # fmt: skip
        for block in self.blocks:
            nn.init.zeros_(block[4].weight)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def residual(steps):
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 16)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return {"model": model}


def slimmed():
    """An L1 penalty has driven most gammas to about zero, to both sides; some are as they were."""
    made = trained(initialised(1.0))
    with torch.no_grad():
        for layer in (made["model"][1], made["model"][4]):
            layer.weight[: len(layer.weight) * 3 // 4] = 1e-3 * torch.randn(len(layer.weight) * 3 // 4)
    return made


NO_FIX = ("trained for a while", "a wide one")
SICK = {
    "DCGAN": initialised,
    "ours": lambda: initialised(norm=bn.BatchNorm2d),
    "every parameter": every_parameter,
    "a checkpoint": lambda: {"model": initialised()["model"].state_dict()},
    "one narrow layer": narrow,
    "a wide one": lambda: initialised(0.0, 1.0),
    "trained for a while": lambda: trained(initialised()),
    "a checkpoint of a trained one": lambda: {"model": trained(initialised())["model"].state_dict()},
}
HEALTHY = {
    "as built": lambda: {"model": generator()},
    "DCGAN, done right": lambda: initialised(1.0),
    "RepVGG: positive on the whole": lambda: initialised(0.1, 0.1, model=wide()),
    "uniform from zero to one": lambda: {"model": uniform()},
    "trained": lambda: trained(initialised(1.0), 50, 1e-2),
    "zero on purpose": lambda: {"model": Residual()},
    "zero on purpose, and trained": lambda: residual(100),
    "some negative": lambda: {"model": flipped()},
    "slimmed": slimmed,
    "no gamma": lambda: {"model": nn.BatchNorm1d(8, affine=False)},
    "on no device": lambda: {"model": nn.BatchNorm1d(8, device="meta")},
    "NaN is another rule's": lambda: {"model": spoiled()},
}


def uniform():
    model = generator()
    for layer in (model[1], model[4]):
        nn.init.uniform_(layer.weight)
    return model


def flipped():
    model = initialised(1.0)["model"]
    with torch.no_grad():
        model[1].weight[:4] *= -1
    return model


def spoiled():
    model = initialised()["model"]
    with torch.no_grad():
        model[1].weight[0] = model[4].weight[0] = float("nan")
    return model
