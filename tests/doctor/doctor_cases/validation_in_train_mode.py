"""BN301, after the threads on stacked hourglass networks: a validation loop that forgets model.eval()."""

import warnings

import torch
import torch.utils.checkpoint
from torch import nn

import batchnorm as bn


def loop(monitor, validate):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for _ in range(2):
            for x in torch.randn(3, 8, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                validate(model, torch.randn(8, 3))


def forgets(model, x):
    model(x)


def remembers(model, x):
    model.eval()
    model(x)
    model.train()


def keeps(model, x):
    with bn.no_update(model):
        model(x)


def only_measures(monitor):
    """A pass over the data without gradients, and no training: the statistics are being recomputed."""
    model = nn.BatchNorm1d(3)
    with monitor(model), torch.no_grad():
        for x in torch.randn(3, 8, 3):
            model(x)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def update_bn(monitor):
    """Measures the statistics anew at the end, over more batches than it trained on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(3, 8, 3):
            model(x).square().mean().backward()
            optimizer.step()
        torch.optim.swa_utils.update_bn(list(torch.randn(9, 8, 3)), model)


def in_every_step(monitor):
    """A GAN's generator, which makes images without gradients for every step of the discriminator."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(4, 8, 3):
            model(x).square().mean().backward()
            for _ in range(2):
                with torch.no_grad():
                    model(x)
            optimizer.step()


class PartlyCheckpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant=True))


def train(monitor, model, call=lambda model, x: model(x)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(4, 8, 3):
            call(model, x).sum().backward()
            optimizer.step()


def wholly_checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)


def checkpointed_once(monitor):
    """One call in the middle within a reentrant checkpoint."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for step, x in enumerate(torch.randn(6, 8, 3)):
            (wholly_checkpointed(model, x) if step == 3 else model(x)).sum().backward()
            optimizer.step()


def sanity_check(monitor):
    """One pass before the training, which moved the statistics, and a second one in the middle, which is the bug."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model):
        for step, x in enumerate(torch.randn(6, 8, 3)):
            if step in (0, 4):
                with torch.no_grad():
                    model(x)
            model(x).square().mean().backward()
            optimizer.step()


def with_gradients(monitor, validate, epochs=2, batches=4, model=None):
    """Validation without no_grad(): the gradients are not used."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for _ in range(epochs):
            model.train()
            for x in torch.randn(3, 8, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            for x in torch.randn(batches, 8, 3):
                validate(model, x)


def epochwise_gan(monitor):
    """The generator trains for some steps, then the discriminator, on images whose gradients are thrown away."""
    g, d = network(), nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_g, of_d = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (g, d))
    with monitor({"G": g, "D": d}, [of_g, of_d]):
        for x in torch.randn(3, 4, 8, 3):
            for one in x:
                d(g(one)).mean().backward()
                of_g.step()
            for one in x:
                d(g(one).detach()).mean().backward()
                of_d.step()


def critic_steps(monitor):
    """Five steps of the critic for each of the generator; the generator makes images with gradients each time."""
    g, d = network(), nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_g, of_d = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (g, d))
    with monitor({"G": g, "D": d}):
        for x in torch.randn(4, 6, 8, 3):
            for one in x[:5]:
                d(g(one).detach()).mean().backward()
                of_d.step()
            d(g(x[5])).mean().backward()
            of_g.step()


def several_a_step(monitor, combine):
    """Gradient accumulation, pairs of views, targets that are detached: calls of which some or all are trained on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(6, 4, 8, 3):
            optimizer.zero_grad()
            combine(model, x)
            optimizer.step()


def accumulated(model, x):
    for one in x:
        model(one).square().mean().backward()


def in_one_backward(model, x):
    sum(model(one).square().mean() for one in x).backward()


def with_targets(model, x):
    targets = [model(one).detach() for one in x[1:]]
    sum((model(x[0]) - target).square().mean() for target in targets).backward()


def by_hand(model, x):
    """torch.autograd.grad instead of backward()."""
    for one in x:
        gradients = torch.autograd.grad(model(one).square().mean(), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient


def frozen_but_for_the_head(monitor):
    """Only the last layer learns: no backward pass reaches the BN layer, and none could."""
    model = network()
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(8, 8, 3):
            model(x).square().mean().backward()
            optimizer.step()


def leaves_batches_out(monitor):
    """Two batches in a row without a backward pass, as where a loss is not finite."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for step, x in enumerate(torch.randn(12, 8, 3)):
            loss = model(x).square().mean()
            if step not in (5, 6):
                loss.backward()
                optimizer.step()


def measures_anew(monitor):
    """Resets the statistics at the end, and measures them without thinking of no_grad()."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(8, 8, 3):
            model(x).square().mean().backward()
            optimizer.step()
        model[1].reset_running_stats()
        for x in torch.randn(5, 8, 3):
            model(x)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


def forgets_once(model):
    with torch.no_grad():
        model(torch.randn(8, 3))


def traced(monitor, mode, then=None):
    """Traces between two epochs; torch calls the model some more times, to see whether the trace does the same."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for _ in range(2):
            for x in torch.randn(4, 8, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # in training mode it does not
                torch.jit.trace(model.train(mode), torch.randn(8, 3))
            model.train()
            if then is not None:
                then(model)


def guesses_labels(monitor, validations):
    """Semi-supervised: in every step the model guesses labels of two batches without gradients, in training mode."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer):
        for x in torch.randn(6, 8, 3):
            with torch.no_grad():
                guessed = (model(x) + model(-x)) / 2
            optimizer.zero_grad()
            (model(x) - guessed).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for x in torch.randn(validations, 8, 3):
                model(x)


SICK_RUNS = {
    "labels are guessed in every step": lambda monitor: guesses_labels(monitor, 9),
    "after it was traced in evaluation mode": lambda monitor: traced(monitor, False, forgets_once),
    "no eval()": lambda monitor: loop(monitor, forgets),
    "an optimiser that was not given": sanity_check,
    "no eval(), no no_grad()": lambda monitor: with_gradients(monitor, forgets),
    "no eval(), no no_grad(), at the end": lambda monitor: with_gradients(monitor, forgets, epochs=1),
    "no eval(), no no_grad(), checkpointed": lambda monitor: with_gradients(monitor, forgets, model=Deep()),
    "no eval(), no no_grad(), our layers": lambda monitor: with_gradients(
        monitor, forgets, model=nn.Sequential(nn.Linear(3, 4), bn.BatchNorm1d(4), nn.Linear(4, 1))
    ),
}
HEALTHY_RUNS = {
    "labels are guessed, a batch or two more": lambda monitor: guesses_labels(monitor, 4),
    "traced in training mode": lambda monitor: traced(monitor, True),
    "traced in evaluation mode": lambda monitor: traced(monitor, False),
    "eval()": lambda monitor: loop(monitor, remembers),
    "no_update": lambda monitor: loop(monitor, keeps),
    "a calibration": only_measures,
    "update_bn": update_bn,
    "in every step": in_every_step,
    "a checkpoint in it": lambda monitor: train(monitor, PartlyCheckpointed()),
    "a checkpoint around it, once": checkpointed_once,
    "eval(), no no_grad()": lambda monitor: with_gradients(monitor, remembers),
    "no_update, no no_grad()": lambda monitor: with_gradients(monitor, keeps),
    "a batch or two": leaves_batches_out,
    "measured anew": measures_anew,
    "a GAN, in turns": epochwise_gan,
    "a GAN with a critic": critic_steps,
    "accumulation": lambda monitor: several_a_step(monitor, accumulated),
    "views": lambda monitor: several_a_step(monitor, in_one_backward),
    "targets of its own": lambda monitor: several_a_step(monitor, with_targets),
    "autograd.grad": lambda monitor: several_a_step(monitor, by_hand),
    "only the head learns": frozen_but_for_the_head,
    "a checkpoint that keeps its graph": lambda monitor: train(monitor, Deep()),
    "a checkpoint around it": lambda monitor: train(monitor, network(), wholly_checkpointed),
}
