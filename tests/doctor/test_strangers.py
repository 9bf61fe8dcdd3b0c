"""What a stranger types: arguments that are nearly right, data that does not fit; a repair that makes no finding."""

import dataclasses

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import batchnorm as bn
import batchnorm.commands
from batchnorm.doctor.codes import RULES
from batchnorm.errors import BatchNormError

X = torch.randn(4, 3, 8, 8)


def two(bias):
    """A new network: only the first convolution has a bias."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)
    )


def test_a_dropped_bias_is_no_trace_of_training():
    model = two(bias=True)
    fixed, _ = bn.fix(model, bn.check(model, X))
    assert fixed[1].running_mean.any()  # where the bias went
    assert not bn.check(fixed, X)


@pytest.mark.parametrize("count", [True, False])
def test_a_layer_that_was_left_out_is_found(count):
    """With the count of batches, and without it, as in old checkpoints."""
    model = two(bias=False)
    model[1](torch.randn(8, 4, 5, 5))
    if not count:
        model[1].num_batches_tracked = None
    else:
        model[1].running_var.fill_(1)
    assert [(f.code, f.path) for f in bn.check(model, X)] == [("BN202", "4")]


@pytest.mark.parametrize("words", ["BN101", "bias-before-norm", "BN104, BN101"])
def test_a_string_names_rules(words):
    model = two(bias=True)
    assert bn.check(model, X, select=words).codes == ("BN101",)
    assert not bn.check(model, X, ignore=words)
    assert not bn.testing.assert_healthy(model, X, per_module_ignores={"0": words}, fail_on="advice")
    with bn.monitor(model, select=words, ignore="BN1") as run:
        assert run.findings.codes == ()


def test_an_unknown_rule_is_named_whole():
    with pytest.raises(BatchNormError, match="there is no rule 'BN999'"):
        bn.check(two(bias=True), select="BN999")


@pytest.mark.parametrize(
    "data", [[X, torch.randn(4, 5, 8, 8)], (X, torch.zeros(4, dtype=torch.long))], ids=["channels", "a pair"]
)
def test_a_batch_that_the_model_does_not_take(data):
    """It is the data's fault, not a bug of the rules, and not 'nothing found'."""
    with pytest.raises(BatchNormError, match=r"raised RuntimeError on batch 2 of the data: .*; data is an iterable"):
        bn.check(two(bias=True), data=data)


def test_the_command_refuses_such_data_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))\n"
        "def data(): return [torch.randn(4, 3, 8, 8), torch.randn(4, 5, 8, 8)]\n"
    )
    result = CliRunner().invoke(batchnorm.commands.app, ["check", "odd_net.py:make", "--data", "odd_net.py:data"])
    assert isinstance(result.exception, BatchNormError)
    assert "bug" not in result.stdout


def test_a_rule_that_breaks_on_good_data_is_reported(monkeypatch):
    def broken(subject):
        raise ZeroDivisionError("of ours")

    monkeypatch.setitem(RULES, "BN201", dataclasses.replace(RULES["BN201"], look=broken))
    assert bn.check(two(bias=False), data=[X]).failed == {"BN201": "ZeroDivisionError: of ours"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of TorchScript
def test_torchscript_is_refused():
    """Its BN layers cannot be seen: 'nothing found' would be a lie."""
    scripted = torch.jit.trace(two(bias=True).eval(), X)
    with pytest.raises(BatchNormError, match="TorchScript"):
        bn.check(scripted, X)


def test_copies_have_names():
    model = two(bias=True)
    with pytest.raises(BatchNormError, match=r'monitor: copies is a list; give them by name: copies=\{"ema"'):
        bn.monitor(model, copies=[model])


@pytest.mark.parametrize("findings", ["BN101", ["BN101"]])
def test_what_is_to_be_fixed_is_findings(findings):
    with pytest.raises(BatchNormError, match=r"fix: a finding is a str; give what bn\.check returned"):
        bn.fix(two(bias=True), findings)


def test_a_run_says_how_it_goes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with bn.monitor(model) as run:
        model(torch.randn(8, 3))
    assert repr(run) == "<MonitoredRun: 0 steps, 1 calls, nothing found>"
