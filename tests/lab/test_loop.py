"""The plain loop, chains of bricks, and trials that are kept, resumed and given equal chances."""

import math

import pytest
import torch
from recorders import recorder_of

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples, hold_out
from batchnorm.lab.judge.trials import each, tuned
from batchnorm.lab.loop import drawn, fit, right, right_by_batch
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Stopped

DATA = examples(sets.load("digits"), flat=True)


def test_a_chain_trains_and_its_weights_do_not_depend_on_the_norm():
    plain, normed = Chain(3, "none"), Chain(3, "batch")
    assert torch.equal(plain.linears[1].weight, normed.linears[1].weight)
    stream = drawn(DATA.train_inputs, DATA.train_labels, seed=0, size=32, steps=80)
    losses = fit(normed, stream, rate=0.1)
    assert losses[-1] < 0.5 < losses[0]
    assert right(normed, DATA.validation_inputs, DATA.validation_labels) > 0.9


def test_batch_statistics_are_those_of_each_batch_and_change_nothing():
    network = Chain(0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    x, y = DATA.validation_inputs[:70], DATA.validation_labels[:70]
    found = right_by_batch(network, x, y, 32)
    network.train()
    with torch.no_grad():
        own = torch.cat([network(x[:32]), network(x[32:64])]).argmax(1)
    assert found == pytest.approx(float((own == y[:64]).double().mean()))
    network.load_state_dict(before)
    right_by_batch(network, x, y, 32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_loss_that_is_not_finite_ends_the_training():
    stream = drawn(DATA.train_inputs, DATA.train_labels, seed=0, size=32, steps=50)
    losses = fit(Chain(0, "none"), stream, rate=1e9)
    assert len(losses) < 50
    assert not math.isfinite(losses[-1])


def test_trials_go_on_where_they_were_stopped(tmp_path):
    calls = []

    def one(case, tick):
        calls.append(case)
        if len(calls) == 2:
            tick()
            tick()  # the second time it is asked to stop it does
        return 2 * case

    with pytest.raises(Stopped):
        each([1, 2, 3], one, recorder_of(tmp_path, stop=lambda: len(calls) == 2))
    assert each([1, 2, 3], one, recorder_of(tmp_path)) == [2, 4, 6]
    assert calls == [1, 2, 2, 3]


def test_the_best_rate_is_chosen_on_held_out_examples(tmp_path):
    seen = []

    def trial(rate, seed, data, tick):
        seen.append((rate, seed, len(data.train_labels)))
        return {"score": None if rate == 1.0 and seed == 102 else rate, "more": seed}

    found = tuned(trial, DATA, (0.1, 0.3, 1.0), recorder_of(tmp_path), seeds=3)
    assert found["rate"] == 0.3  # one seed fails at 1.0
    assert found["fresh"] == [{"score": 0.3, "more": seed} for seed in range(3)]
    held = len(hold_out(DATA).train_labels)
    assert all((size == held) == (seed > 100) for _, seed, size in seen)


def test_the_rate_of_each_step_is_asked_for_and_every_step_is_followed():
    seen, network = [], Chain(0)
    start = network.linears[0].weight.detach().clone()
    stream = drawn(DATA.train_inputs, DATA.train_labels, seed=0, size=32, steps=3)
    fit(network, stream, rate=lambda done: 0.0, after=seen.append)
    assert seen == [1, 2, 3]
    assert torch.equal(network.linears[0].weight, start)
