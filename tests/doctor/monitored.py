"""A small network, a loop, and a watcher that records its events: for the tests of ``bn.monitor``."""

import torch
from torch import nn

from batchnorm.doctor.watcher import Watcher


def network(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(3, 4), norm(4), nn.ReLU(), nn.Linear(4, 1))


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def train(model, optimizer, steps=3):
    for x in torch.randn(steps, 8, 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def forget(model):
    with torch.no_grad():
        model(torch.randn(8, 3))


def hooks_of(*models):
    return sum(len(getattr(m, n)) for model in models for m in model.modules() for n in vars(m) if "_hooks" in n)


def global_hooks():
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


class Log(Watcher):
    """Records its events."""

    modules = (nn.ReLU,)

    def __init__(self):
        self.events, self.passes = [], []

    def on_begin(self, run):
        self.events.append("begin")
        return ()

    def on_call(self, run, arguments, keywords):
        self.events.append(("call", run.call, len(arguments), sorted(keywords)))
        return ()

    def on_pass(self, run, seen):
        self.events.append(("pass", seen.path, seen.call, seen.turn))
        fields = ("path", "from_batch", "updates", "gradients", "recomputed", "call", "turn", "values")
        self.passes.append({name: getattr(seen, name) for name in fields})
        return ()

    def on_module(self, run, path, module, arguments, output):
        self.events.append(("module", path))
        return ()

    def on_return(self, run, output):
        self.events.append(("return", output is not None))
        return ()

    def on_copy(self, run, name):
        self.events.append(("copy", name))
        return ()

    def on_backward(self, run, path):
        self.events.append(("backward", path))
        return ()

    def on_step(self, run):
        self.events.append(("step", run.step, run.calls_since_step))
        return ()

    def on_end(self, run):
        self.events.append("end")
        return ()
