"""BN304, after yolov5#1630: a nominal batch of 64 that is made of small ones."""

import torch
from doctor_cases import mixed_forwards
from torch import nn

import batchnorm as bn


def network():
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def loss(model, x):
    return model(x).square().mean()


def accumulates(monitor, times=4, examples=8, steps=16, around=None, model=None):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(steps):
            with (around or torch.enable_grad)(*([model] if around else [])):
                for x in torch.randn(times, examples, 3):
                    loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()


def scaled(monitor):
    """A gradient scaler that skips a step now and then: the next one then has two backward passes."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for step in range(40):
            loss(model, torch.randn(8, 3)).backward()
            if step % 10 != 3:
                optimizer.step()
                optimizer.zero_grad()


def lbfgs(monitor):
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    with monitor(model, optimizer):
        for x in torch.randn(16, 8, 3):

            def closure(x=x):
                optimizer.zero_grad()
                value = loss(model, x + 0)  # another tensor every time
                value.backward()
                return value

            optimizer.step(closure)


def sharpness_aware(monitor):
    """Two passes on the same batch, the second from a point nearby."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for x in torch.randn(20, 8, 3):
            loss(model, x).backward()
            with torch.no_grad():
                moved = [p.grad * 0.01 for p in model.parameters()]
                for p, by in zip(model.parameters(), moved, strict=True):
                    p.add_(by)
            loss(model, x).backward()
            with torch.no_grad():
                for p, by in zip(model.parameters(), moved, strict=True):
                    p.sub_(by)
            optimizer.step()
            optimizer.zero_grad()


def siamese(monitor):
    """Two calls, one backward pass: no accumulation."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for a, b in torch.randn(16, 2, 8, 3):
            (model(a) - model(b)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def critic(monitor, set_to_none=True):
    """A critic learns five times as often: what reaches the generator then is cleared before its own step."""
    generator, judge = network(), nn.Linear(1, 1)
    steps = {net: torch.optim.SGD(net.parameters(), lr=0.01) for net in (generator, judge)}
    with monitor({"G": generator, "D": judge}, list(steps.values())):
        for _ in range(16):
            for _ in range(5):
                steps[judge].zero_grad()
                judge(generator(torch.randn(8, 3))).mean().backward()  # the images are not detached
                steps[judge].step()
            steps[generator].zero_grad(set_to_none=set_to_none)
            judge(generator(torch.randn(8, 3))).mean().backward()
            steps[generator].step()


SICK_RUNS = {
    "four micro-batches": accumulates,
    "two of sixteen": lambda monitor: accumulates(monitor, 2, 16),
    "our layers": lambda monitor: accumulates(monitor, model=bn.accelerate(network(), torch.randn(8, 3))[0]),
}
HEALTHY_RUNS = {
    "bn.accumulate": lambda monitor: accumulates(monitor, around=bn.accumulate),
    "no_update": lambda monitor: accumulates(monitor, around=bn.no_update),
    "one backward pass a step": lambda monitor: accumulates(monitor, times=1, steps=60),
    "a gradient scaler": scaled,
    "LBFGS": lbfgs,
    "sharpness-aware": sharpness_aware,
    "siamese": siamese,
    "a GAN": mixed_forwards.dcgan,
    "a critic": critic,
    "a critic, gradients set to zero": lambda monitor: critic(monitor, set_to_none=False),
}
