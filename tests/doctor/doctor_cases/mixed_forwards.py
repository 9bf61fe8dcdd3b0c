"""BN303, after MixMatch-pytorch#43 and ganhacks#52: real and generated, or labelled and not, in separate calls."""

import torch
from torch import nn

import batchnorm as bn


def network(norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))


def generator():
    return nn.Sequential(nn.Linear(4, 36), nn.BatchNorm1d(36), nn.Tanh(), nn.Unflatten(1, (1, 6, 6)))


def real():
    return torch.rand(16, 1, 6, 6) + torch.rand(16, 1, 1, 1)


def gan(monitor, together, steps=14, discriminate=lambda d, real, fake: (d(real), d(fake))):
    g, d = generator(), network()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (g, d)]
    with monitor({"G": g, "D": d}, optimizers) if together else monitor(d, optimizers[1]):
        for _ in range(steps):
            fake = g(torch.randn(16, 4))
            optimizers[1].zero_grad()
            of_real, of_fake = discriminate(d, real(), fake.detach())
            (of_fake.mean() - of_real.mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            with bn.no_update(d):
                (-d(fake).mean()).backward()
            optimizers[0].step()


def dcgan(monitor):
    """Each batch with a backward pass of its own, and a third call of the discriminator for the generator."""
    g, d = generator(), network()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (g, d)]
    with monitor((g, d)):
        for _ in range(14):
            optimizers[1].zero_grad()
            (-d(real()).mean()).backward()
            fake = g(torch.randn(16, 4))
            d(fake.detach()).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-d(fake).mean()).backward()
            optimizers[0].step()


def guessed_labels(monitor, unlabelled):
    """MixMatch: labels are guessed without gradients, in training mode, on data of another kind."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(14):
            with torch.no_grad():
                guess = model(unlabelled())
            optimizer.zero_grad()
            (model(real()) - guess).square().mean().backward()
            optimizer.step()


def keeps_fakes_out(d, real, fake):
    of_real = d(real)
    with bn.no_update(d):
        return of_real, d(fake)


def in_one_call(d, real, fake):
    return d(torch.cat([real, fake])).chunk(2)


def by_domain(monitor):
    model = network(lambda c: bn.DomainBatchNorm(c, ("real", "fake")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(14):
            optimizer.zero_grad()
            for name, x in (("real", real()), ("fake", torch.randn(16, 1, 6, 6))):
                with bn.use_domain(model, name):
                    model(x).square().mean().backward()
            optimizer.step()


def micro_batches(monitor, size, steps=30):
    """The same kind of data in small pieces, which differ from one another by chance only."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(4):
                x = torch.rand(size, 1, 6, 6) + torch.rand(size, 1, 1, 1)
                model(x).square().mean().backward()
            optimizer.step()


def pairs(monitor):
    """Two examples at a time and one value of each: moments that differ wildly, and by chance."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with monitor(model, optimizer):
        for _ in range(100):
            optimizer.zero_grad()
            for _ in range(4):
                model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()


SICK_RUNS = {
    "a GAN": lambda monitor: gan(monitor, True),
    "its discriminator alone": lambda monitor: gan(monitor, False),
    "a DCGAN": dcgan,
    "guessed labels": lambda monitor: guessed_labels(monitor, lambda: torch.randn(16, 1, 6, 6)),
}
HEALTHY_RUNS = {
    "no_update": lambda monitor: gan(monitor, True, discriminate=keeps_fakes_out),
    "one call on both": lambda monitor: gan(monitor, False, discriminate=in_one_call),
    "DomainBatchNorm": by_domain,
    "unlabelled data of the same kind": lambda monitor: guessed_labels(monitor, real),
    "micro-batches": lambda monitor: micro_batches(monitor, 8),
    "micro-batches of two": lambda monitor: micro_batches(monitor, 2, steps=60),
    "pairs": pairs,
    "too short to tell": lambda monitor: gan(monitor, True, steps=5),
}
