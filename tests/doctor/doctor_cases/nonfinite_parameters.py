"""BN208: gamma, beta or weights that an infinite loss has made NaN; the running statistics are as good as ever."""

import torch
from torch import nn

import batchnorm as bn

NAN, INF = float("nan"), float("inf")


def network(norm=nn.BatchNorm2d):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(16, 3, 6, 6))
    return model.eval()


def spoiled(path="1.weight", value=NAN, norm=nn.BatchNorm2d):
    model = network(norm)
    with torch.no_grad():
        layer, _, name = path.rpartition(".")
        getattr(model.get_submodule(layer), name).flatten()[1] = value
    return {"model": model}


def stepped():
    """One step with an infinite loss."""
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.randn(8, 3, 6, 6)) / torch.zeros(())).square().sum().backward()
    optimizer.step()
    return {"model": model}


def given(arguments, **more):
    return {**arguments, **more}


class Attention(nn.Module):
    """Keeps its mask, minus infinity above the diagonal, as a parameter; one more as a buffer."""

    def __init__(self):
        super().__init__()
        mask = torch.full((4, 4), -INF).triu(1)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.register_buffer("other", mask)
        self.norm = nn.BatchNorm1d(4)


SICK = {
    "gamma is NaN": lambda: spoiled("1.weight"),
    "gamma is infinite": lambda: spoiled("1.weight", INF),
    "beta is NaN": lambda: spoiled("1.bias"),
    "beta is minus infinity": lambda: spoiled("1.bias", -INF),
    "a convolution": lambda: spoiled("0.weight"),
    "a bias": lambda: spoiled("0.bias", INF),
    "a linear layer behind the last norm": lambda: spoiled("4.weight"),
    "ours": lambda: spoiled("1.weight", norm=bn.BatchNorm2d),
    "ours, frozen": lambda: spoiled("1.weight", norm=bn.FrozenBatchNorm),
    "with an example": lambda: given(spoiled(), example=torch.randn(4, 3, 6, 6)),
    "with data": lambda: given(spoiled("1.bias"), data=[torch.randn(4, 3, 6, 6)] * 2),
    "a step with an infinite loss": stepped,
    "a checkpoint": lambda: {"model": spoiled("1.weight")["model"].state_dict()},
    "a checkpoint, a weight": lambda: {"model": spoiled("4.weight", INF)["model"].state_dict()},
    "no norm at all": lambda: {"model": nn.Sequential(spoiled("4.bias")["model"][4])},
    "half precision": lambda: {"model": spoiled("1.weight")["model"].bfloat16()},
}
HEALTHY = {
    "finite": lambda: {"model": network()},
    "a checkpoint": lambda: {"model": network().state_dict()},
    "large": lambda: spoiled("1.weight", 1e38),
    "a mask": lambda: {"model": Attention()},
    "a mask, in a checkpoint": lambda: {"model": Attention().state_dict()},
    "statistics are another rule's": lambda: {"model": statistics()},
    "on no device": lambda: {"model": nn.BatchNorm1d(3, device="meta")},
    "float8, for storage": lambda: {"model": {"a.weight": torch.ones(4).to(torch.float8_e4m3fn)}},
}


def statistics():
    model = network()
    model[1].running_var[0] = NAN
    return model
