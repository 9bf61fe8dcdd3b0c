"""BN103, after pytorch/pytorch#20967, #37823, #44415 and #156051: flags that were set after a layer was built."""

import torch
from torch import nn

import batchnorm as bn


def case(layer, example=True, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU())
    return {"model": model, "example": torch.randn(4, 3, 6, 6) if example else None}


def flat(layer, rows=6):
    return {"model": nn.Sequential(nn.Linear(3, 4), layer), "example": torch.randn(rows, 3)}


def learnt(layer):
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


SICK = {
    "tracking turned off later": lambda: case(nn.BatchNorm2d(4), track_running_stats=False),
    "and without an example": lambda: case(nn.BatchNorm2d(4), example=False, track_running_stats=False),
    "of ours": lambda: case(bn.BatchNorm2d(4, activation="relu"), track_running_stats=False),
    "of a subclass": lambda: case(OwnForward(4), track_running_stats=False),
    "no buffers": lambda: case(nn.BatchNorm2d(4), running_mean=None, running_var=None),
    "one buffer": lambda: case(nn.BatchNorm2d(4), example=False, running_var=None),
    "tracking turned on later": lambda: case(nn.BatchNorm2d(4, track_running_stats=False), track_running_stats=True),
    "instance norm": lambda: case(nn.InstanceNorm2d(4), example=False, track_running_stats=True),
    "a switch without statistics": lambda: case(
        bn.BatchNorm2d(4, track_running_stats=False, statistics="running"), example=False
    ),
    "an update of nothing": lambda: case(bn.BatchNorm2d(4, track_running_stats=False, update=True)),
    "momentum 0": lambda: case(nn.BatchNorm2d(4, momentum=0.0)),
    "momentum 0 after training": lambda: case(learnt(nn.BatchNorm2d(4, momentum=0.0))),
    "one example alone raises": lambda: flat(nn.BatchNorm1d(4, track_running_stats=False)),
}
NO_FIX = ("of a subclass", "one buffer", "a switch without statistics", "one example alone raises")
HEALTHY = {
    "as built": lambda: case(nn.BatchNorm2d(4)),
    "in evaluation": lambda: case(learnt(nn.BatchNorm2d(4)).eval()),
    "built without statistics, on maps": lambda: case(nn.BatchNorm2d(4, track_running_stats=False)),
    "tracking and buffers taken away together": lambda: case(
        nn.BatchNorm2d(4), track_running_stats=False, running_mean=None, running_var=None
    ),
    "a switch": lambda: case(bn.BatchNorm2d(4, update=False)),
    "a switch and the flag": lambda: case(bn.BatchNorm2d(4, update=False), track_running_stats=False),
    "frozen": lambda: case(bn.FrozenBatchNorm(4)),
    "the batch's, on purpose": lambda: flat(bn.BatchNorm1d(4, track_running_stats=False, statistics="batch")),
    "a cumulative average": lambda: case(nn.BatchNorm2d(4, momentum=None)),
    "instance norm": lambda: case(nn.InstanceNorm2d(4)),
    "instance norm that tracks": lambda: case(nn.InstanceNorm2d(4, track_running_stats=True)),
    "no norm": lambda: case(nn.Identity()),
}


def network(norm=nn.BatchNorm1d, **options):
    return nn.Sequential(nn.Linear(3, 4), norm(4, **options), nn.ReLU(), nn.Linear(4, 1))


def scheduled(monitor, change, norm=nn.BatchNorm1d, steps=12, **options):
    """A loop in which ``change(layer, step)`` is called before every step."""
    model = network(norm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for step in range(steps):
            change(model[1], step)
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()


def sets(**attributes):
    """From the fifth step on."""

    def change(layer, step):
        if step >= 4:
            for name, value in attributes.items():
                setattr(layer, name, value)

    return change


def halves(layer, step):
    """PointNet++'s schedule without its lower bound: every step halves and more."""
    layer.momentum = 0.5 * 0.1**step


def to_a_floor(layer, step):
    layer.momentum = max(0.5 * 0.1**step, 0.001)


def at_the_end(layer, step):
    """A cosine that arrives at 0 in the last step."""
    layer.momentum = 0.1 * (1 - step / 11)


def sharpness_aware(monitor):
    """Two passes a step, the second with momentum 0, as SAM does it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(8):
            for momentum in (0.1, 0.0):
                model[1].momentum = momentum
                model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()


def held_in_the_others_steps(monitor):
    """A discriminator with momentum 0 in the generator's five steps, and 0.1 in its own."""
    g, d = network(), nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizers = {"g": torch.optim.SGD(g.parameters(), lr=0.01), "d": torch.optim.SGD(d.parameters(), lr=0.01)}
    with monitor({"G": g, "D": d}, optimizers):
        for _ in range(4):
            for which in "dggggg":
                d[1].momentum = 0.1 if which == "d" else 0.0
                d(g(torch.randn(8, 3))).square().mean().backward()
                optimizers[which].step()


def evaluates(layer, step):
    """Frozen by eval() from the fifth step on, with momentum 0 as well."""
    layer.train(step < 4)
    layer.momentum = 0.1 if step < 4 else 0.0


SICK_RUNS = {
    "momentum scheduled to 0": lambda monitor: scheduled(monitor, sets(momentum=0.0)),
    "momentum halved for ever": lambda monitor: scheduled(monitor, halves),
    "from a cumulative average to 0": lambda monitor: scheduled(monitor, sets(momentum=0.0), momentum=None),
    "of ours": lambda monitor: scheduled(monitor, sets(momentum=0.0), norm=bn.BatchNorm1d),
    "tracking turned off": lambda monitor: scheduled(monitor, sets(track_running_stats=False)),
}
HEALTHY_RUNS = {
    "a schedule to a floor": lambda monitor: scheduled(monitor, to_a_floor),
    "a schedule that ends at 0 in the last step": lambda monitor: scheduled(monitor, at_the_end),
    "momentum 0 in the second pass of every step": sharpness_aware,
    "momentum 0 in another network's steps": held_in_the_others_steps,
    "momentum 0 from the beginning": lambda monitor: scheduled(monitor, lambda layer, step: None, momentum=0.0),
    "eval(), too": lambda monitor: scheduled(monitor, evaluates),
    "switched": lambda monitor: scheduled(monitor, sets(update=False), norm=bn.BatchNorm1d),
}
