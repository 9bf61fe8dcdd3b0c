"""BN109, after pytorch/vision#2599 and pytorch/pytorch#115500: half-precision models whose variances become zero."""

import torch
from torch import nn

import batchnorm as bn


def network(norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm(4), nn.ReLU())


def half(dtype, norm=nn.BatchNorm2d, training=True, example=True):
    model = network(norm).to(dtype).train(training)
    return {"model": model, "example": torch.randn(2, 3, 6, 6, dtype=dtype) if example else None}


def small_variances():
    """Variances of 1e-9, which float16 does not know."""
    model = network()
    model[1].running_var.fill_(1e-9)
    return {"model": model.half().eval(), "example": torch.randn(2, 3, 6, 6).half()}


def large_variances():
    model = network()
    model[1].running_var.fill_(1e5)
    return {"model": model.half().eval(), "example": torch.randn(2, 3, 6, 6).half()}


def with_momentum():
    case = half(torch.bfloat16)
    optimizer = torch.optim.SGD(case["model"].parameters(), lr=0.01, momentum=0.9)
    case["model"](case["example"]).float().square().mean().backward()
    optimizer.step()
    return {**case, "optimizer": optimizer}


def only_gamma():
    model = network()
    model[1].weight.data = model[1].weight.data.bfloat16()
    model[1].bias.data = model[1].bias.data.bfloat16()
    return {"model": model}


def stubborn():
    """A layer that insists on one type."""

    class Strict(nn.BatchNorm2d):
        def forward(self, x):
            assert x.dtype == self.weight.dtype
            return super().forward(x)

    return half(torch.bfloat16, Strict)


def own_type():
    """A layer that gives the type that its parameters have."""

    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    return half(torch.bfloat16, Own)


def mixed(norm):
    model = network(norm).bfloat16()
    model[1].float()
    return {"model": model, "example": torch.randn(2, 3, 6, 6).bfloat16()}


SICK = {
    "bfloat16": lambda: half(torch.bfloat16),
    "float16": lambda: half(torch.float16),
    "ours": lambda: half(torch.bfloat16, bn.BatchNorm2d),
    "evaluation": lambda: half(torch.bfloat16, training=False),
    "variances that are zero": small_variances,
    "variances that are infinite": large_variances,
    "an optimiser with state": with_momentum,
    "gamma and beta": only_gamma,
    "a layer of one type": stubborn,
    "a layer that gives its own type": own_type,
    "a checkpoint": lambda: {"model": network().bfloat16().state_dict()},
    "without gamma": lambda: half(torch.bfloat16, lambda c: nn.BatchNorm2d(c, affine=False)),
}
NO_FIX = ("a layer of one type", "a layer that gives its own type")
HEALTHY = {
    "float32": lambda: half(torch.float32),
    "float64": lambda: half(torch.float64),
    "only the activations": lambda: mixed(nn.BatchNorm2d),
    "only the activations, ours": lambda: mixed(bn.BatchNorm2d),
    "a checkpoint": lambda: {"model": network().state_dict()},
    "no statistics, no gamma": lambda: half(
        torch.bfloat16, lambda c: nn.BatchNorm2d(c, affine=False, track_running_stats=False)
    ),
    "another norm": lambda: half(torch.bfloat16, lambda c: nn.GroupNorm(2, c)),
}
