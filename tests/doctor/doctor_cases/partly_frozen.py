"""BN105, after pytorch/pytorch#86590 and Lightning#15062: a "frozen" backbone whose statistics go on to move."""

import copy

import torch
from torch import nn

import batchnorm as bn


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(64, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x):
        return self.head(self.backbone(x))


class Remembers(Net):
    """Freezes its backbone's mode anew in every train(), as fine-tuning code should."""

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


class Momentum(nn.Module):
    """Two encoders; the second follows the first, and its statistics are meant to move."""

    def __init__(self):
        super().__init__()
        self.query = Net()
        self.key = copy.deepcopy(self.query)
        self.key.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.key(x)
        return self.query(x) - target


class Detached(Net):
    """Cuts the gradient behind its backbone, instead of freezing it."""

    def forward(self, x):
        return self.head(self.backbone(x).detach())


class Returnless(Net):
    """A train() of its own that returns nothing, as many have: eval() returns nothing either."""

    def train(self, mode=True):
        super().train(mode)
        self.backbone[1].eval()


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Distilled(nn.Module):
    """A student and the fixed teacher whose outputs it learns, which was not put into evaluation mode."""

    def __init__(self, teacher=None, gradients=True):
        super().__init__()
        self.student, self.teacher = Net(), teacher or Net()
        self.teacher.requires_grad_(gradients)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


class Perceptual(nn.Module):
    """A feature extractor behind the network, through which gradients go."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.features = Net()

    def forward(self, x):
        return self.features(self.body(x))


class Shadowed(Net):
    """The argument and the method have one name."""

    def __init__(self, freeze_bn=True):
        super().__init__()
        self.freeze_bn = freeze_bn

    def freeze_bn(self):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
                module.eval()


class NormEval(Net):
    """Says so, and does it in every train()."""

    def __init__(self, works=True):
        super().__init__()
        self.norm_eval, self.works = True, works

    def train(self, mode=True):
        super().train(mode)
        if self.works:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
                    module.eval()
        return self


def with_optimizer(model, *learning):
    """The model and an optimizer of those parts of it."""
    return {"model": model, "optimizer": torch.optim.SGD([p for part in learning for p in part.parameters()], lr=0.01)}


def without_norms(model):
    """An optimizer that was given the weights and forgot gamma and beta."""
    return torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.01)


def steps(monitor, model, optimizer, number=8, between=lambda step: None, given=True):
    """A plain loop."""
    target = model if isinstance(model, nn.Module) else nn.ModuleDict(model)
    with monitor(model, *([optimizer] if given else [])):
        for step in range(number):
            optimizer.zero_grad()
            x = torch.randn(4, 3, 6, 6)
            if isinstance(target, nn.ModuleDict):
                with torch.no_grad():
                    aim = target["teacher"](x)
                loss = (target["student"](x) - aim).square().mean()
            else:
                loss = target(x).square().mean()
            loss.backward()
            optimizer.step()
            between(step)


def ema(model):
    """An update of the second encoder after every step."""

    def update(step):
        with torch.no_grad():
            for p, q in zip(model.key.parameters(), model.query.parameters(), strict=True):
                p.lerp_(q, 1e-3)

    return update


def begun(model):
    """With a query that has gone on a little: equal encoders have nothing to learn here."""
    with torch.no_grad():
        for p in model.query.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def critics(monitor, given=True, toggle=False):
    """A GAN with five steps of the discriminator for one of the generator; who does not learn has no gradients."""
    nets = {"G": Net(), "D": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    with monitor(nets, *([list(optimizers.values())] if given else [])):
        for _ in range(4):
            for name in "DDDDDG":
                for other, net in nets.items():
                    net.requires_grad_(other == name or not toggle)
                optimizers[name].zero_grad()
                fake = nets["G"](torch.randn(4, 3, 6, 6))
                nets["D"](fake if name == "G" else fake.detach()).square().mean().backward()
                optimizers[name].step()


def part(model, learning, **options):
    return lambda monitor: steps(
        monitor, net := model(), torch.optim.SGD(learning(net).parameters(), lr=0.01), **options
    )


def frozen(model, *modules):
    for module in modules:
        module.requires_grad_(False)
    return {"model": model}


def no_gradients(**options):
    model = Net(**options)
    return frozen(model, model.backbone)


def norm_only():
    model = Net()
    return frozen(model, model.backbone[1])


def in_eval(model=None, learn=True):
    model = (model or Net()).train()
    model.backbone.requires_grad_(learn)
    model.backbone.eval()
    return {"model": model, "example": torch.randn(2, 3, 6, 6)}


def subclass():
    model = Net()
    model.backbone[1] = OwnForward(4)
    return frozen(model, model.backbone)


def with_freeze():
    model, _ = bn.freeze(Net(), "backbone")
    model.backbone.requires_grad_(False)
    return {"model": model.train()}


SICK = {
    "no gradients": no_gradients,
    "only the norm": norm_only,
    "without gamma": lambda: no_gradients(affine=False),
    "the whole model": lambda: frozen(model := Net(), model),
    "a cumulative average": lambda: no_gradients(momentum=None),
    "a subclass": subclass,
    "eval()": in_eval,
    "eval() and no gradients": lambda: in_eval(learn=False),
    "eval() of ours": lambda: {"model": nn.Sequential(nn.Linear(2, 2), bn.BatchNorm1d(2).eval())},
}
SICK |= {
    "one of two equal blocks": lambda: frozen(net := blocks(), net[0]),
    "in no optimizer": lambda: with_optimizer(net := Net(), net.head),
    "gamma and beta in no optimizer": lambda: {"model": (net := Net()), "optimizer": without_norms(net)},
    "a teacher": lambda: with_optimizer(net := Distilled(), net.student),
    "a teacher without gradients": lambda: with_optimizer(net := Distilled(gradients=False), net.student),
    "a feature extractor": lambda: with_optimizer(net := Perceptual(), net.body),
    "an attribute that hides a method": lambda: {"model": Shadowed()},
    "an attribute of a part": lambda: {"model": nn.Sequential(nn.Identity(), Shadowed())},
    "an attribute that nothing reads": lambda: {"model": NormEval(works=False).train()},
}
HEALTHY = {
    "all learns": lambda: {"model": Net()},
    "freeze": with_freeze,
    "train() remembers": lambda: in_eval(Remembers(), learn=False),
    "train() returns nothing": lambda: {"model": returnless(), "example": torch.randn(2, 3, 6, 6)},
    "evaluation": lambda: {"model": no_gradients()["model"].eval()},
    "a momentum encoder": lambda: {"model": Momentum()},
    "a momentum encoder, and the optimizer": lambda: with_optimizer(net := Momentum(), net.query),
    "everything in the optimizer": lambda: with_optimizer(net := Net(), net),
    "everything in two optimizers": lambda: {
        "model": (net := Net()),
        "optimizer": [
            torch.optim.SGD(net.head.parameters(), lr=0.1),
            torch.optim.SGD(net.backbone.parameters(), lr=0.1),
        ],
    },
    "a teacher in evaluation mode": lambda: with_optimizer(distilled := quiet(), distilled.student),
    "an attribute that is False": lambda: {"model": Shadowed(freeze_bn=False)},
    "an attribute that train() obeys": lambda: {"model": NormEval().train(), "example": torch.randn(2, 3, 6, 6)},
    "a norm without gamma in a model that learns": lambda: {"model": Net(affine=False)},
    "frozen, without statistics": lambda: no_gradients(track_running_stats=False),
    "eval() without statistics": lambda: in_eval(Net(track_running_stats=False)),
    "gamma without beta": lambda: {"model": nn.Sequential(nn.Linear(2, 2), half_learning())},
}


def blocks():
    """Two blocks of the same make, with weights of their own."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)))


def quiet():
    """A teacher that stays in evaluation mode."""
    model = Distilled(teacher=bn.freeze(Net())[0])
    model.teacher.eval()
    return model


def returnless():
    model = Returnless()
    model.train()
    return model


def half_learning():
    layer = nn.BatchNorm1d(2)
    layer.bias.requires_grad_(False)
    return layer


def epochs(monitor, before_epoch, model=None, count=2, validate=True, learns=None):
    """Two epochs of three steps; ``before_epoch(model, epoch)`` sets the modes."""
    model = model or Net()
    optimizer = torch.optim.SGD((learns or model).parameters(), lr=0.01)
    with monitor(model, optimizer):
        for epoch in range(count):
            before_epoch(model, epoch)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 3, 6, 6)).square().mean().backward()
                optimizer.step()
            if validate:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(2, 3, 6, 6))


def once(model, epoch):
    """eval() before the first epoch; train() before the second."""
    model.train()
    if epoch == 0:
        model.backbone.eval()


def every(model, epoch):
    model.train()
    model.backbone.eval()


def after_the_first(model, epoch):
    """Freezes in the second epoch, and forgets it in the third."""
    model.train()
    if epoch == 1:
        model.backbone.eval()


def on_purpose(model, epoch):
    """Frozen in the first epoch, with gamma and beta; learns in the second."""
    model.train()
    model.backbone.train(epoch > 0).requires_grad_(epoch > 0)


def no_gradient(model, epoch):
    model.train()
    model.backbone.requires_grad_(False)


def teacher():
    """A momentum encoder whose parameters still require gradients."""
    model = Momentum()
    model.key.requires_grad_(True)
    return model


def gan(monitor):
    """The discriminator is held still while the generator learns, and the other way round."""
    nets = {"G": Net(), "D": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    with monitor(nets, list(optimizers.values())):
        for _ in range(8):
            for name, other in (("G", "D"), ("D", "G")):
                nets[name].requires_grad_(True)
                nets[other].requires_grad_(False)
                optimizers[name].zero_grad()
                nets["D"](nets["G"](torch.randn(4, 3, 6, 6))).square().mean().backward()
                optimizers[name].step()


def alternates(monitor):
    """A step of the head on frozen features, then one of everything, and so on."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for step in range(6):
            model.train()
            model.backbone.train(step % 2 == 1)
            optimizer.zero_grad()
            model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()


class Contrast(Momentum):
    """Both encoders see the batch; the key's statistics are its own."""

    def forward(self, x):
        with torch.no_grad():
            key = self.key(x)
        return self.query(x) - key


def forgets_train(model, epoch):
    """The validation at the end of the first epoch puts the model into evaluation mode, and there it stays."""


def never_back(monitor):
    """A look at the validation data before the first step, and no train() after it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        with torch.no_grad():
            model.eval()(torch.randn(4, 3, 6, 6))
        for _ in range(4):
            model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()


def from_the_first_step(model, epoch):
    model.eval()


def attacks(monitor):
    """Adversarial training: perturbed in evaluation mode, with gradients, and trained on in training mode."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(6):
            x = torch.randn(4, 3, 6, 6, requires_grad=True)
            with torch.no_grad():
                model.eval()(x)
            model(x).square().mean().backward()
            model.train()
            optimizer.zero_grad()
            model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
            optimizer.step()


def frozen_later(model, epoch):
    """The BN layers stand still from the second epoch on, in a model that is in training mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.train(epoch == 0)


def frozen_on_purpose(monitor):
    """The whole model in evaluation mode for a second phase, which no validation comes before."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for step in range(12):
            model.train(step < 4)
            model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()
            if step == 7:
                with torch.no_grad():
                    model(torch.randn(4, 3, 6, 6))


SICK_RUNS = {
    "no train() after the validation": lambda monitor: epochs(monitor, forgets_train),
    "no train() after a first validation": never_back,
    "train() undoes it": lambda monitor: epochs(monitor, once),
    "without validation": lambda monitor: epochs(monitor, once, validate=False),
    "frozen later, thawed by train()": lambda monitor: epochs(monitor, after_the_first, count=3),
    "no gradients": lambda monitor: epochs(monitor, no_gradient),
    "a gradient that is cut off": lambda monitor: epochs(
        monitor, lambda model, epoch: model.train(), model=(model := Detached()), learns=model.head
    ),
}
SICK_RUNS |= {
    "in no optimizer": part(Net, lambda net: net.head),
    "in no optimizer, which is not given": part(Net, lambda net: net.head, given=False, number=14),
    "gamma and beta in no optimizer": lambda monitor: steps(monitor, net := Net(), without_norms(net)),
    "a teacher": part(Distilled, lambda net: net.student),
    "a teacher without gradients": part(lambda: Distilled(gradients=False), lambda net: net.student),
    "a teacher without gamma": part(lambda: Distilled(Net(affine=False), gradients=False), lambda net: net.student),
    "a teacher that the student began as": part(lambda: begun(teacher()), lambda net: net.query, number=60),
    "a teacher beside the student": lambda monitor: steps(
        monitor, nets := {"student": Net(), "teacher": Net()}, torch.optim.SGD(nets["student"].parameters(), lr=0.01)
    ),
    "a feature extractor": part(Perceptual, lambda net: net.body),
    "a gradient that is cut off, all in the optimizer": part(Detached, lambda net: net),
    "an attribute that hides a method": part(Shadowed, lambda net: net),
}
HEALTHY_RUNS = {
    "a momentum encoder that moves": lambda monitor: steps(
        monitor, net := begun(Momentum()), torch.optim.SGD(net.query.parameters(), lr=0.01), number=60, between=ema(net)
    ),
    "a momentum encoder in the optimizer": lambda monitor: steps(
        monitor, net := begun(teacher()), torch.optim.SGD(net.parameters(), lr=0.01), number=60, between=ema(net)
    ),
    "five steps of the discriminator": critics,
    "five steps of the discriminator, without gradients": lambda monitor: critics(monitor, toggle=True),
    "five steps of the discriminator, optimizers unknown": lambda monitor: critics(monitor, given=False),
    "a teacher in evaluation mode": part(quiet, lambda net: net.student),
    "an attribute that train() obeys": part(lambda: NormEval().train(), lambda net: net),
    "eval() in every epoch": lambda monitor: epochs(monitor, every),
    "nothing is frozen": lambda monitor: epochs(monitor, lambda model, epoch: model.train()),
    "freeze": lambda monitor: epochs(
        monitor, lambda model, epoch: model.train(), model=bn.freeze(Net(), "backbone")[0]
    ),
    "thawed on purpose": lambda monitor: epochs(monitor, on_purpose),
    "modes that alternate": alternates,
    "a momentum encoder": lambda monitor: epochs(monitor, lambda model, epoch: model.train(), model=Contrast()),
    "evaluation mode from the first step": lambda monitor: epochs(monitor, from_the_first_step, count=3),
    "evaluation mode before it began": lambda monitor: epochs(monitor, forgets_train, model=Net().eval(), count=3),
    "only the BN layers, later": lambda monitor: epochs(monitor, frozen_later, count=3),
    "attacks": attacks,
    "a second phase": frozen_on_purpose,
    "freeze, and no train()": lambda monitor: epochs(monitor, forgets_train, model=bn.freeze(Net())[0], count=3),
    'statistics="running", and no train()': lambda monitor: epochs(
        monitor, forgets_train, model=bn.convert(Net(), "frozen")[0], count=3
    ),
    "a momentum encoder that could learn": lambda monitor: epochs(
        monitor, lambda model, epoch: model.train(), model=(model := teacher()), learns=model.query
    ),
    "a GAN": gan,
    "train() returns nothing": lambda monitor: epochs(monitor, lambda model, epoch: model.train(), model=Returnless()),
}
