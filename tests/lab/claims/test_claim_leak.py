from dataclasses import replace

import pytest
import torch
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import leak
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples

DATA = examples(sets.load("digits"))


def results_of(kind):
    leaky = {"confirmed": [0.3] * 5, "refuted": [0.9] * 5, "inconclusive": [0.4, 0.5, 0.8, 0.9, 0.9]}[kind]

    def fresh(scores):
        return [{"score": score, "grouped": 0.99, "calibrated": score} for score in scores]

    return [{"rate": 0.1, "sweep": [], "fresh": fresh(leaky if arm == leak.LEAKY else [0.95] * 5)} for arm in leak.ARMS]


def test_the_rule_gives_every_verdict():
    check_rule(leak.CLAIM, results_of)


def test_groups_are_seen_by_their_own_statistics():
    network = leak.network_of(leak.LEAKY, 0, DATA)
    x, y = DATA.validation_inputs[:200], DATA.validation_labels[:200]
    found = leak.grouped(network, x, y)
    alone = leak.network_of("synchronised", 0, DATA).train()  # the same weights
    right = count = 0
    with torch.no_grad():
        for label in range(10):
            own = x[y == label]
            for start in range(0, len(own) - 15, 16):
                right += int((alone(own[start : start + 16]).argmax(1) == label).sum())
                count += 16
    assert count >= 100
    assert found == pytest.approx(right / count, abs=2 / count)


def test_devices_that_are_apart_do_not_see_each_other():
    network = leak.network_of("synchronised", 0, DATA).train()
    x = DATA.train_inputs[:64]
    with torch.no_grad():
        assert torch.equal(leak.apart(network, x)[:16], network(x[:16]))


def test_an_arm_trains_on_what_its_devices_see(tmp_path, monkeypatch):
    few = replace(
        DATA,
        train_inputs=DATA.train_inputs[:256],
        train_labels=DATA.train_labels[:256],
        validation_inputs=DATA.validation_inputs[:200],
        validation_labels=DATA.validation_labels[:200],
    )
    monkeypatch.setattr(leak, "examples", lambda data: few)
    monkeypatch.setattr(leak, "tuned", lambda trial, data, *_, **__: dict(trial(0.1, 0, data, lambda: None)))
    found = leak.measure({"arm": "synchronised", "data": "digits", "steps": 3, "seeds": 1}, recorder_of(tmp_path))
    network = leak.network_of("synchronised", 0, few)
    leak.fit(network, leak.groups(few.train_inputs, few.train_labels, 0, 3), rate=0.1)
    x, y = few.validation_inputs, few.validation_labels
    assert found["score"] == leak.right(network, x, y)
    assert found["grouped"] == leak.grouped(network, x, y)
