"""A check says how many rules could run, and its advice is true: who follows it has so many more."""

import inspect
import re

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.doctor.codes import RULES
from batchnorm.doctor.coverage import example_sizes
from batchnorm.doctor.needs import ARGUMENTS, NEEDS

SENTENCE = re.compile(r"(\d+) of (\d+) rules could run(?:; (?:add (\w+)=(.*)|train under bn.monitor) for (\d+) more)?")


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())


def said(findings):
    looked, of, argument, value, more = SENTENCE.fullmatch(str(findings).splitlines()[-1]).groups()
    return int(looked), int(of), argument, value, int(more or 0)


def test_the_advice_is_true_until_nothing_is_left_to_add():
    model = make()
    values = {
        "data": [torch.randn(8, 3, 8, 8) for _ in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "before": make(),
    }
    given, advised = {}, []
    looked, of, argument, value, more = said(bn.check(model))
    assert of == len(RULES)
    while argument:
        advised.append(argument)
        given[argument] = eval(value, {"torch": torch}) if argument == "example" else values[argument]
        before = looked + more
        looked, of, argument, value, more = said(bn.check(model, **given))
        assert looked == before
    assert advised == ["example", "data", "optimizer", "before"]
    assert more == sum(rule.look is None for rule in RULES.values())


def test_no_line_where_all_looked():
    assert str(bn.check(make(), select=["BN103"])) == "nothing found"


def test_ignored_rules_do_not_count():
    looked, of, *_ = said(bn.check(make(), ignore=["BN1"]))
    assert of == sum(not code.startswith("BN1") for code in RULES)
    assert 0 < looked < of


def test_of_a_checkpoint_the_model_is_asked_for():
    line = str(bn.check(make().state_dict())).splitlines()[-1]
    (looked, of, more) = map(int, re.findall(r"\d+", line))
    assert "give the model (not its state_dict)" in line
    assert looked + more == said(bn.check(make()))[0]
    assert of == len(RULES)


def test_notebooks_say_it_too():
    html = bn.check(make())._repr_html_()
    assert "rules could run; add example=torch.randn(8, 3, 32, 32) for" in html


def test_it_stays_where_findings_are_left_out():
    findings = bn.check(make())
    assert findings.without({"*": ["BN1"]}).coverage() == findings.coverage() != ""


def test_every_argument_is_one_of_check():
    assert set(ARGUMENTS) == {"model", *inspect.signature(bn.check).parameters} & set(NEEDS)


@pytest.mark.parametrize(
    "first",
    [
        nn.Conv1d(3, 4, 3),
        nn.Conv2d(3, 4, 3),
        nn.Conv3d(1, 2, 3),
        nn.ConvTranspose2d(5, 2, 3),
        nn.Linear(7, 2),
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3),
        nn.BatchNorm3d(2),
        bn.BatchNorm2d(3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_suggested_sizes_fit(first):
    sizes = example_sizes(nn.Sequential(nn.Identity(), first))
    assert sizes[0] > 1
    first(torch.randn(sizes))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)), nn.LayerNorm(3)])
def test_no_sizes_where_the_first_layer_does_not_say(model):
    assert example_sizes(model) == ()
