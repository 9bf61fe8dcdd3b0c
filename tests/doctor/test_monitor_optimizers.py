"""Whose step is a step: several optimisers, scalers that skip, closures."""

import torch
from monitored import Log, network, sgd, train
from torch import nn

from batchnorm.doctor.watcher import Watcher


def test_optimisers_that_are_not_given_are_found_and_others_are_not(watched):
    model, stranger = network(), network()
    of_model, of_stranger = sgd(model), sgd(stranger)
    with watched(Log(), model) as run:
        train(stranger, of_stranger)
        assert run.step == 0
        train(model, of_model)
        assert run.step == 3
        late = torch.optim.Adam(model.parameters())
        train(model, late)
    assert run.step == 6


def test_each_layer_counts_the_steps_of_its_own_optimiser(watched):
    g, d, log = network(), network(), Log()
    of_g, of_d = sgd(g), sgd(d)
    with watched(log, {"G": g, "D": d}, (of_g, of_d)) as run:
        for _ in range(2):
            train(d, of_d, 2)
            train(g, of_g, 1)
    assert run.step == 6
    assert [(p["path"], p["turn"]) for p in log.passes] == [
        ("D.1", 0), ("D.1", 1), ("G.1", 0), ("D.1", 2), ("D.1", 3), ("G.1", 1),
    ]  # fmt: skip
    assert [p["call"] for p in log.passes] == [1, 2, 3, 4, 5, 6]


def test_two_optimisers_for_one_network(watched):
    model, log = network(lambda c: nn.BatchNorm1d(c, affine=False)), Log()
    first, second = sgd(model[0]), sgd(model[3])
    with watched(log, model, [first, second]) as run:
        model(torch.randn(8, 3)).sum().backward()
        first.step()
        second.step()
        model(torch.randn(8, 3))
    assert run.step == 2
    assert log.passes[-1]["turn"] == 2  # it has no parameters, so both are its own


def test_a_skipped_step_of_a_gradient_scaler(watched):
    model, log = network(), Log()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(log, model, optimizer) as run:
        for scale in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 3)).mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    assert run.step == 2
    assert [p["turn"] for p in log.passes] == [0, 1, 1]


def test_lbfgs_calls_the_model_in_its_step(watched):
    class Stepping(Watcher):
        def __init__(self):
            self.seen = []

        def on_pass(self, run, seen):
            self.seen.append(run.stepping)
            return ()

    model, watcher = network(), Stepping()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 3) * torch.arange(8.0)[:, None]).square().mean()
        loss.backward()
        return loss

    with watched(watcher, model, optimizer) as run:
        optimizer.step(closure)
        model(torch.randn(8, 3))
    assert run.step == 1
    assert watcher.seen[0] is optimizer
    assert watcher.seen[-1] is None
