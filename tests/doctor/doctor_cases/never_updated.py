"""BN202, after equinox#955: parameters were trained, and the state that BN keeps was left behind."""

import torch
from torch import nn

import batchnorm as bn


def network(momentum=0.1, norm=nn.BatchNorm2d, **arguments):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8, momentum=momentum, **arguments), nn.ReLU(),
        nn.Conv2d(8, 4, 3), norm(4, momentum=momentum, **arguments),
    )  # fmt: skip


def trained(momentum=0.1, steps=3, **arguments):
    model = network(momentum, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in torch.randn(steps, 8, 3, 8, 8):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return model, optimizer


def left_behind(**arguments):
    model = network(**arguments)
    model.load_state_dict(dict(trained(**arguments)[0].named_parameters()), strict=False)
    return model


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.spare = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.used(self.body(x))


class Uncalled(nn.Linear):
    """Deep supervision that is off: its BN layer is there, and not called."""

    def __init__(self):
        super().__init__(3, 2)
        self.norm = nn.BatchNorm1d(2)


def two_heads(**more):
    model = TwoHeads()
    model(torch.randn(8, 3))
    return {"model": model.eval(), **more}


def one_left():
    model, _ = trained()
    model[4].reset_running_stats()
    return {"model": model, **DATA()}


def DATA():
    return {"data": list(torch.randn(6, 16, 3, 8, 8) * 2 + 1)}


def frozen_from_the_start():
    """A loop that trains in evaluation mode: gamma and beta move, the statistics do not."""
    model = network().eval()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, **DATA()}


def only_the_optimiser_knows():
    """Trained in evaluation mode, with BN that has no gamma and no beta."""
    model = network(affine=False).eval()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return {"model": model.train(), "optimizer": optimizer, **DATA()}


def new_head():
    """A trained body with a new head, and an optimiser that has not begun."""
    body, _ = trained()
    model = nn.Sequential(*body, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    return {"model": model, "optimizer": torch.optim.SGD(model[5:].parameters(), lr=0.1, momentum=0.9), **DATA()}


def dcgan():
    """Gammas that begin as random numbers about 1, in an untrained network."""
    model = network()
    for layer in (model[1], model[4]):
        nn.init.normal_(layer.weight, 1.0, 0.02)
    return {"model": model}


def run(monitor, model, modes=None, steps=5, together=None):
    """A loop that sets no mode, or those of ``modes(model, step)``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(together or model, optimizer):
        for step in range(steps):
            if modes is not None:
                modes(model, step)
            optimizer.zero_grad()
            (model(torch.randn(8, 3, 8, 8)) - 1).square().mean().backward()
            optimizer.step()


def only_layers(model, step):
    """Fine-tuning code that holds all BN layers still, in a model that learns."""
    model.train()
    for layer in (model[1], model[4]):
        layer.eval()


def validates_first(monitor):
    """A sanity check before the first epoch, as Lightning's, and train() is not called after it: BN105 says that."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer, select=["BN105", "BN202"]) as watching:
        with torch.no_grad():
            model.eval()(torch.randn(8, 3, 8, 8))
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 3, 8, 8)).square().mean().backward()
            optimizer.step()
    assert watching.findings.codes == ("BN105",)


def pretrained(**arguments):
    return trained(steps=3, **arguments)[0].eval()


def folded():
    """Statistics of 0 and 1 that are right: a converter has put the real ones into gamma and beta."""
    model = network().eval()
    with torch.no_grad():
        for layer in (model[1], model[4]):
            layer.bias.normal_()
    return model


def only_others_learn(monitor):
    model = network().eval()
    for layer in (model[1], model[4]):
        layer.requires_grad_(False)
    run(monitor, model)


def evaluated(monitor):
    model = network().eval()
    with monitor(model), torch.no_grad():
        for _ in range(5):
            model(torch.randn(8, 3, 8, 8))


SICK_RUNS = {
    "eval() from the first step": lambda monitor: run(monitor, network().eval()),
    "one of several": lambda monitor: run(monitor, m := network().eval(), together={"G": m, "D": nn.BatchNorm1d(3)}),
    "layers of ours": lambda monitor: run(monitor, network(norm=bn.BatchNorm2d).eval()),
    "eval() in every epoch": lambda monitor: run(monitor, network(), modes=lambda model, step: model.eval()),
    "random gammas": lambda monitor: run(monitor, dcgan()["model"].eval()),
    "a new head on a pretrained body": lambda monitor: run(
        monitor, nn.Sequential(*pretrained(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    ),
}
HEALTHY_RUNS = {
    "training mode": lambda monitor: run(monitor, network()),
    "pretrained, with frozen statistics": lambda monitor: run(monitor, pretrained()),
    "freeze": lambda monitor: run(monitor, bn.freeze(network())[0].eval()),
    "frozen by switches": lambda monitor: run(monitor, bn.freeze(pretrained())[0]),
    "gamma and beta do not learn": only_others_learn,
    "only the layers are in evaluation mode": lambda monitor: run(monitor, network(), modes=only_layers),
    "statistics that are folded into beta": lambda monitor: run(monitor, folded()),
    "no running statistics": lambda monitor: run(monitor, network(track_running_stats=False).eval()),
    "two steps, then training mode": lambda monitor: run(
        monitor, network(), modes=lambda model, step: model.train(step > 1)
    ),
    "modes in turn": lambda monitor: run(monitor, network(), modes=lambda model, step: model.train(step % 2 == 1)),
    "no gamma and beta": lambda monitor: run(monitor, network(affine=False).eval()),
    "evaluation only": evaluated,
}


SICK = {
    "buffers left behind": lambda: {"model": left_behind().eval(), **DATA()},
    "still in training mode": lambda: {"model": left_behind(), **DATA()},
    "a checkpoint": lambda: {"model": left_behind().state_dict()},
    "an untrained model in evaluation mode": lambda: {"model": network().eval(), **DATA()},
    "momentum 0": lambda: {"model": trained(momentum=0.0)[0], **DATA()},
    "trained in evaluation mode": frozen_from_the_start,
    "only the optimiser knows": only_the_optimiser_knows,
    "one layer": one_left,
    "one layer of ours": lambda: {"model": nn.Sequential(bn.BatchNorm2d(3)).eval(), **DATA()},
}
HEALTHY = {
    "a new model": lambda: {"model": network()},
    "a new model with its optimiser": lambda: {
        "model": (model := network()),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    },
    "the checkpoint of a new model": lambda: {"model": network().state_dict()},
    "random gammas": dcgan,
    "a new head that is about to learn": new_head,
    "trained": lambda: {"model": trained()[0].eval()},
    "a layer that the example does not reach": lambda: two_heads(example=torch.randn(4, 3)),
    "a layer with no trace of training": two_heads,
    "the only layer, and it is never called": lambda: {"model": Uncalled().eval(), "example": torch.randn(4, 3)},
    "on no device": lambda: {"model": nn.BatchNorm1d(3, device="meta").eval()},
    "no running statistics": lambda: {"model": trained(track_running_stats=False)[0].eval()},
    "no BN": lambda: {"model": nn.Linear(2, 2).eval()},
}
