"""BN102, after torch/torch7#846: "does weight decay also penalize gamma and beta?" "Yes it does." """

import torch
from torch import nn

import batchnorm as bn


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4), nn.GroupNorm(2, 4)
    )


def ready():
    model = network()
    model(torch.randn(2, 3, 6, 6))
    return model


def trained(optimizer_of):
    """A model whose optimiser has state, which the repair has to keep."""
    model = ready()
    optimizer = optimizer_of(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def several():
    """One optimiser for the body, one for the head; the second has groups of its own."""
    model = ready()
    body = torch.optim.SGD(model[:4].parameters(), lr=0.1, weight_decay=1e-4)
    head = torch.optim.AdamW(
        [{"params": [model[4].weight], "weight_decay": 0.1}, {"params": [model[4].bias, *model[5].parameters()]}],
        lr=1e-3,
    )
    return {"model": model, "optimizer": [body, head]}


def frozen_with_gradients():
    """requires_grad is off, but the gradient that is left over lets the decay through."""
    case = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2))
    case["model"].requires_grad_(False)
    case["model"][0].weight.requires_grad_(True)
    return case


def frozen():
    model = ready()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    for norm in (model[1], model[5]):
        norm.requires_grad_(False)
    return {"model": model, "optimizer": optimizer}


def scheduled():
    case = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4))
    torch.optim.lr_scheduler.CosineAnnealingLR(case["optimizer"], 10)
    return case


class Scaled(torch.optim.Optimizer):
    """Layer-wise rates, as for large batches; ``spare`` leaves out what has one axis, without saying so."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.9, spare=True):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "spare": spare})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                change = p.grad
                if p.dim() > 1 or not group["spare"]:
                    change = change + group["weight_decay"] * p
                if p.dim() > 1:
                    change = change * (1e-3 * p.norm() / change.norm().clamp(min=1e-12))
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                p.sub_(velocity.mul_(group["momentum"]).add_(change), alpha=group["lr"])


SICK = {
    "a user's own optimiser": lambda: trained(lambda m: Scaled(m.parameters(), lr=0.1, weight_decay=1e-4, spare=False)),
    "all parameters": lambda: trained(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    ),
    "AdamW": lambda: trained(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)),
    "Adam": lambda: trained(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=1e-4)),
    "named": lambda: trained(lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1, weight_decay=1e-4)),
    "a group of norms alone": lambda: trained(
        lambda m: torch.optim.SGD(
            [{"params": m[0].parameters()}, {"params": m[1].parameters(), "name": "norms"}], lr=0.1, weight_decay=1e-4
        )
    ),
    "several optimisers": several,
    "frozen, with gradients left over": frozen_with_gradients,
    "with a schedule": scheduled,
}
HEALTHY = {
    "an optimiser that spares what has one axis": lambda: trained(
        lambda m: Scaled(m.parameters(), lr=0.1, weight_decay=1e-4)
    ),
    "no decay": lambda: trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "param_groups": lambda: trained(lambda m: torch.optim.AdamW(bn.param_groups(m, 0.05), lr=1e-3)),
    "frozen": frozen,
    "a decay of next to nothing": lambda: trained(
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    ),
    "no gamma": lambda: {
        "model": (model := nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4),
    },
}
