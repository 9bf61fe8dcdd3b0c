"""``recipe``: section 4.2.1, in place, each change listed."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import batchnorm as bn


def parts():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Sequential(nn.Dropout2d(0.1).eval(), nn.ReLU()))
    groups = [{"params": [model[0].weight], "lr": 0.3}, {"params": [model[0].bias], "weight_decay": 0.0}]
    return model, torch.optim.SGD(groups, lr=0.1, weight_decay=1e-3)


def test_every_change():
    model, optimizer = parts()
    changes = bn.recipe(optimizer, 5, model)
    assert [str(c) for c in changes] == [
        "optimizer group 0: lr 0.3 -> 1.5",
        "optimizer group 0: weight_decay 0.001 -> 0.0002",
        "optimizer group 1: lr 0.1 -> 0.5",
        "1: dropout 0.4 -> None",
        "2.0: dropout 0.1 -> None",
    ]
    assert [g["lr"] for g in optimizer.param_groups] == [1.5, 0.5]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0002, 0.0]
    assert isinstance(model[1], nn.Identity)
    assert isinstance(model[2][0], nn.Identity)
    assert (model[1].training, model[2][0].training) == (True, False)
    assert bn.recipe(optimizer, 1, model, weight_decay=1) == []


def rates(scheduler, steps):
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 12, gamma=0.5),
        lambda o: lr_scheduler.MultiStepLR(o, [6, 12, 12, 30], gamma=0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.97),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 60),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=48),
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=60, power=2.0),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    ],
    ids=["step", "multistep", "exponential", "cosine", "linear", "polynomial", "lambda"],
)
def test_schedules_run_six_times_as_fast(make):
    _, optimizer = parts()
    slow = rates(make(optimizer), 60)
    _, optimizer = parts()
    scheduler = make(optimizer)
    changes = bn.recipe(optimizer, 5, scheduler=scheduler)
    assert [c.path for c in changes].count("scheduler") == 1
    assert [g["initial_lr"] for g in optimizer.param_groups] == [1.5, 0.5]
    assert scheduler.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
    fast = rates(scheduler, 10)
    assert fast == pytest.approx([5 * rate for rate in slow[::6]], rel=1e-6)


def test_several_optimisers_and_a_tensor_rate():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    rate = torch.tensor(0.01)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(other.parameters(), lr=rate)]
    changes = bn.recipe(optimizers, 30)
    assert [c.path for c in changes] == ["optimizer 0 group 0", "optimizer 1 group 0"]
    assert optimizers[1].param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)


def test_dropout_that_is_an_argument_and_a_model_that_is_dropout():
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(2, 2, 2, dropout=0.3), "attention": nn.MultiheadAttention(4, 2, dropout=0.2)}
    )
    _, optimizer = parts()
    assert [str(c) for c in bn.recipe(optimizer, 1, model, weight_decay=1)] == [
        "lstm: dropout 0.3 -> None",
        "attention: dropout 0.2 -> None",
    ]
    assert (model["lstm"].dropout, model["attention"].dropout) == (0.0, 0.0)
    alone = nn.Dropout(0.5)
    bn.recipe(optimizer, 1, alone)
    assert torch.equal(alone(torch.ones(9)), torch.ones(9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"factor": 0}, "factor is 0"),
        ({"faster": -1}, "faster is -1"),
        ({"optimizer": None}, "optimizer is a NoneType"),
        ({"optimizer": [nn.Linear(2, 2)]}, "optimizer is a Linear"),
        ({"scheduler": "cyclic"}, "how to make a CyclicLR faster is not known"),
        ({"scheduler": "foreign"}, "the scheduler belongs to another optimizer"),
    ],
)
def test_bad_input_changes_nothing(arguments, words):
    _, optimizer = parts()
    schedules = {
        "cyclic": lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
        "foreign": lr_scheduler.StepLR(parts()[1], 3),
    }
    arguments = {"optimizer": optimizer, **arguments}
    if "scheduler" in arguments:
        arguments["scheduler"] = schedules[arguments["scheduler"]]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(bn.BatchNormError, match=words):
        bn.recipe(**arguments)
    assert optimizer.state_dict() == before
