"""Runs that are too short: a rule that saw something and cannot judge it says how far it is."""

import copy

import pytest
import torch
from doctor_cases import never_updated
from doctor_cases.mixed_forwards import gan
from monitored import network, sgd, train
from torch import nn

import batchnorm as bn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def skipped(loop, **options):
    runs = []

    def monitor(*arguments):
        runs.append(bn.monitor(*arguments, warn=False, **options))
        return runs[-1]

    loop(monitor)
    return runs[0].findings


@pytest.mark.parametrize(("steps", "short"), [(5, True), (12, True), (13, False)])
def test_several_calls_a_step(steps, short):
    findings = skipped(lambda monitor: gan(monitor, False, steps=steps), select=["BN303"])
    said = {"BN303": f"too short to judge: {steps} of 13 steps with several calls"} if short else {}
    assert findings.skipped == said
    assert findings.codes == (() if short else ("BN303",))


def accumulating(steps):
    def loop(monitor):
        model = network()
        optimizer = sgd(model)
        with monitor(model, optimizer):
            for micro_batches in torch.randn(steps, 2, 4, 3):
                optimizer.zero_grad()
                for x in micro_batches:
                    model(x).square().mean().backward()
                optimizer.step()

    return loop


@pytest.mark.parametrize(("steps", "short"), [(3, True), (14, False)])
def test_accumulation(steps, short):
    findings = skipped(accumulating(steps), select=["BN304"])
    assert ("BN304" in findings.skipped) == short
    assert ("BN304" in findings.codes) != short


def small_batches(size):
    """Batches of rows that tell as much as they are many."""

    def loop(monitor):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = sgd(model)
        with monitor(model, optimizer):
            for x in torch.randn(5, size, 3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    return loop


@pytest.mark.parametrize(
    ("size", "every", "words"),
    [
        (4, 50, "too short to judge: 5 of 101 steps, for batches of fewer than 16"),
        (4, 3, "too short to judge: 5 of 7 steps, for batches of fewer than 16"),
        (4, 1, None),
        (16, 50, None),
    ],
)
def test_tiny_batches(size, every, words):
    findings = skipped(small_batches(size), select=["BN205"], every=every)
    assert findings.skipped.get("BN205") == words
    assert findings.codes == (("BN205",) if every == 1 else ())


SHORT = "too short to judge: the labels of 5 of 32 batches"
LABELS = "needs the class labels of the batches (run.set_labels(labels))"
COPIES = "needs the copies that follow the model, if there are any (copies=)"


@pytest.mark.parametrize(("tell", "batches", "said"), [(True, 5, SHORT), (True, 32, None), (False, 5, LABELS)])
def test_labels(tell, batches, said):
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False, select=["BN306"]) as run:
        for _ in range(batches):
            if tell:
                run.set_labels(torch.arange(8) % 2)
            train(model, optimizer, 1)
    assert run.findings.skipped == ({"BN306": said} if said else {})


@pytest.mark.parametrize(("steps", "said"), [(2, "2 of 3 steps of new layers in evaluation mode"), (3, None)])
def test_training_in_evaluation_mode(steps, said):
    model = network().eval()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False, select=["BN202"]) as run:
        train(model, optimizer, steps)
    assert run.findings.skipped == ({"BN202": f"too short to judge: {said}"} if said else {})
    assert run.findings.codes == (() if said else ("BN202",))


def test_training_in_evaluation_mode_after_a_validation_is_said_once():
    runs = []

    def monitor(*arguments, **options):
        runs.append(bn.monitor(*arguments, warn=False, **options))
        return runs[-1]

    never_updated.validates_first(monitor)
    assert [finding.path for finding in runs[0].findings] == ["1", "4"]


@pytest.mark.parametrize("where", ["outside", "inside", "nowhere"])
def test_copies(where):
    model = network()
    averaged = copy.deepcopy(model).requires_grad_(False)
    both = nn.ModuleDict({"online": model, "target": averaged}) if where == "inside" else model
    copies = {"ema": averaged} if where == "outside" else None
    optimizer = sgd(model)
    with bn.monitor(both, optimizer, copies=copies, warn=False, select=["BN305"]) as run:
        assert run.findings.skipped == {}  # nothing has happened yet
        train(model, optimizer, 1)
    assert run.findings.skipped == ({"BN305": COPIES} if where == "nowhere" else {})


def test_a_copy_of_another_model_is_named():
    model, strange = network(), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    with bn.monitor(model, copies={"ema": strange, "plain": nn.Linear(3, 1)}, warn=False, select=["BN305"]) as run:
        train(model, sgd(model), 1)
    assert run.findings.skipped == {"BN305": "needs copies of the model: no BN layer of 'ema' is one of its own"}


def test_a_model_without_layers_lacks_nothing():
    model = nn.Linear(3, 2)
    with bn.monitor(model, warn=False) as run:
        model(torch.randn(4, 3))
    assert run.findings.skipped == {}


def test_an_ordinary_run_lacks_only_what_it_was_not_told_and_a_rule_that_broke_is_not_short():
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        for x in torch.randn(3, 16, 3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert run.findings.skipped == {"BN305": COPIES, "BN306": LABELS}
    assert "could not run" not in repr(run)
