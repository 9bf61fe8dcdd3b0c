"""What the rules about numbers say and do beyond firing: which layer, which batch, what a repair leaves alone."""

import copy
import math

import pytest
import torch
from doctor_cases import poisoned_statistics, single_value, stale_after_compression, stale_statistics, wrong_fold
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import batchnorm as bn
from batchnorm.doctor.gap import MEAN, VARIANCE, by_chance
from batchnorm.doctor.present import summarise_skipped
from batchnorm.doctor.rules.padded_input import counts_in
from batchnorm.doctor.subject import larger, measured


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_accuracy_that_is_lost_is_an_error():
    (finding,) = bn.check(**stale_statistics.case(0.001), select=["BN201"])
    assert finding.severity == "error"
    assert finding.numbers["accuracy"] < 0.8
    assert finding.numbers["accuracy_calibrated"] > 0.95
    (finding,) = bn.check(**stale_statistics.case(0.001, labels=False), select=["BN201"])
    assert finding.severity == "warning"


def test_accuracy_counts_where_every_layer_is_within_the_allowance():
    findings = bn.check(**stale_statistics.within_the_allowance(), select=["BN201"])
    assert findings.errors
    for finding in findings:
        assert finding.numbers["mean_off"] < MEAN
        assert finding.numbers["variance_log_ratio"] < VARIANCE
        assert finding.numbers["accuracy_calibrated"] > finding.numbers["accuracy"] + 0.2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: stale_statistics.worse(-8.0), "exact statistics would lose accuracy: from 100.0% to 9"),
        (lambda: stale_statistics.within_the_allowance(labels=False), "within the fluctuation of a running average"),
        (lambda: stale_statistics.without_effect(stale_statistics.case(0.001)), "the outputs change by 0.0% only"),
        (lambda: stale_statistics.within_the_allowance(by=1.0, number=9), "9 labelled examples are too few to be sure"),
    ],
    ids=["loses accuracy", "no labels", "no effect", "too few labels"],
)  # fmt: skip
def test_what_is_held_back_has_its_reason(make, reason):
    findings = bn.check(**make(), select=["BN201"])
    assert not findings
    assert findings.skipped["BN201"].startswith("held back: at ")
    assert reason in findings.skipped["BN201"]
    drawn = "\n".join(summarise_skipped(findings.skipped))
    assert reason in " ".join(drawn.split())
    assert "could not run" not in drawn


def test_what_is_held_back_after_compression_has_its_reason():
    findings = bn.check(**stale_after_compression.HEALTHY["no effect"](), select=["BN504"])
    assert not findings
    assert findings.skipped["BN504"] == (
        "held back: 1 layer is off since the change; with exact statistics the outputs change by 0.0% only"
    )


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (9, 0), (9, 4), (40, 37), (300, 310)])
def test_the_probability_of_a_gain_by_chance(gained, lost):
    both = gained + lost
    wanted = sum(math.comb(both, k) for k in range(gained, both + 1)) / 2**both
    assert by_chance(gained, lost) == pytest.approx(wanted, rel=1e-12)


def test_a_new_layer_and_a_poisoned_one_are_not_mistaken_for_stale_ones():
    """Their accuracy is lost, too, and calibration would bring it back: by what BN202 and BN203 report."""
    for spoil in (nn.BatchNorm1d.reset_running_stats, lambda layer: layer.running_mean.fill_(float("nan"))):
        arguments = stale_statistics.within_the_allowance(by=0.0)
        spoil(arguments["model"][2])
        findings = bn.check(**arguments, select=["BN201", "BN202", "BN203"])
        assert {finding.path for finding in findings} == {"2"}
        assert "BN201" not in findings.codes


def encoder(width):
    """The features of a classifier whose statistics are stale, with the labels of its data."""
    model, batches = stale_statistics.trained(0.001)
    return {"model": nn.Sequential(*model[:3], nn.Linear(16, width)), "data": batches}


@pytest.mark.parametrize("width", [3, 5, 64, 2], ids=str)
def test_features_have_no_accuracy(width):
    """Labels were given, and the model gives features: so many that some are 0, 1 and 2, or fewer than classes."""
    (finding,) = bn.check(**encoder(width), select=["BN201"])
    assert "accuracy" not in finding.sentence
    assert "the outputs change by" in finding.sentence
    assert "accuracy" not in finding.numbers
    assert finding.severity == "warning"


def test_scores_of_more_classes_than_the_data_have_an_accuracy():
    arguments = stale_statistics.case(0.001)
    head = arguments["model"][3]
    arguments["model"][3] = nn.Linear(16, 10)
    with torch.no_grad():
        arguments["model"][3].weight[:3], arguments["model"][3].bias[:3] = head.weight, head.bias
        arguments["model"][3].bias[3:] = -9.0
    (finding,) = bn.check(**arguments, select=["BN201"])
    assert "accuracy goes from" in finding.sentence
    assert finding.severity == "error"


def test_only_what_is_poisoned_is_measured_anew():
    arguments = poisoned_statistics.negative()
    repaired, report = bn.fix(arguments["model"], bn.check(**arguments, select=["BN203"]), unsafe=True)
    assert report.paths == ("1",)
    assert torch.equal(repaired[4].running_mean, arguments["model"][4].running_mean)
    exact = measured(copy.deepcopy(arguments["model"]), arguments["data"], None)[0]
    torch.testing.assert_close(repaired[1].running_var, exact[1].running_var)


@pytest.mark.parametrize(
    ("name", "first", "inputs", "parameters"), [("a bad batch", "1", 1, 0), ("a bad weight", "4", 0, 1)]
)
def test_the_batch_and_the_layer_that_were_first(name, first, inputs, parameters):
    runs = []

    def monitor(*arguments):
        runs.append(bn.monitor(*arguments, warn=False, select=["BN203"]))
        return runs[-1]

    poisoned_statistics.SICK_RUNS[name](monitor)
    finding = runs[0].findings[0]
    assert finding.path == finding.numbers["first"] == first
    assert (finding.step, finding.numbers["call"]) == (3, 4)
    assert (finding.numbers["bad_inputs"], finding.numbers["bad_parameters"]) == (inputs, parameters)


@pytest.mark.parametrize(
    ("name", "severity", "words"),
    [
        (
            "an example",
            "error",
            "the example has 24 NaN or infinite values of 24, and they reach 1: measurements on it",
        ),
        (
            "data",
            "error",
            "all 4 batches of the data have NaN or infinite values (batch 1: 1 of 96), and they reach 1:",
        ),
        ("data of one batch", "error", "the batch of the data has NaN or infinite values (batch 1: 24 of 24)"),
        ("one batch of the data", "error", "1 of 4 batches of the data has NaN or infinite values (batch 3: 1 of 96)"),
        ("our layers", "warning", "2 of 4 batches of the data have NaN or infinite values (batch 2: 1 of 96)"),
        ("no layers at all", "error", "and they reach the outputs"),
    ],
)
def test_data_that_are_not_finite_are_named_in_the_whole_check(name, severity, words):
    findings = bn.check(**poisoned_statistics.SICK[name]())
    (finding,) = [finding for finding in findings if finding.code == "BN203"]
    assert finding.severity == severity
    assert words in finding.sentence
    assert not findings.failed


def test_a_batch_of_one_does_not_stop_training_any_more():
    arguments = single_value.case(single_value.classifier())
    with pytest.raises(ValueError, match="more than 1 value"):
        arguments["model"](torch.randn(1, 5))
    repaired, report = bn.fix(arguments["model"], bn.check(**arguments, select=["BN204"]))  # without unsafe=True
    assert type(repaired[1]) is bn.BatchNorm1d
    assert repaired(torch.randn(1, 5)).shape == (1, 2)
    assert report.certificate.absolute < 1e-5


def test_only_the_layer_that_was_folded_wrongly_is_named():
    before = wrong_fold.upsampler()
    after = wrong_fold.folded(before, 3)
    after[0] = torch.ao.nn.intrinsic.ConvReLU2d(fuse_conv_bn_eval(after[0], after[1]), nn.ReLU())
    after[1] = after[2] = nn.Identity()
    findings = bn.check(**wrong_fold.case(before, after), select=["BN503"])
    assert [finding.path for finding in findings] == ["3"]
    assert findings[0].numbers["norm"] == "4"


def test_where_padding_is():
    x = torch.randn(3, 4, 9)
    for row, length in zip(x, (9, 5, 2), strict=True):
        row[:, length:] = 0
    expected = torch.arange(9) < torch.tensor([9, 5, 2]).unsqueeze(1)
    assert torch.equal(counts_in(x), expected)
    assert torch.equal(counts_in(x.flip(-1)), expected.flip(-1))
    x[1, :, 5:] = 1.0  # another constant: not padding of one kind
    assert counts_in(x) is None


def test_batches_are_joined_only_where_they_fit():
    a, b = torch.zeros(4, 3), torch.zeros(4, 5)
    assert [tuple(x.shape) for x in larger([a, a, b, b, b], least=8)] == [(8, 3), (12, 5)]
    assert larger([(a, 1), (a, 2)], least=8)[0].shape == (8, 3)


def test_a_purpose_that_nobody_knows():
    with pytest.raises(bn.BatchNormError, match="'deploy'"):
        bn.check(nn.ReLU(), purpose="deploy")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_all_channels_also_in_those_that_are_not_looked_at_first(side):
    x = torch.randn(4, 16, 20)
    lengths = torch.tensor([20, 15, 10, 5])
    for example, length in zip(x, lengths, strict=True):
        example[:, length:] = 0
    x = x.flip(2) if side == "left" else x
    assert counts_in(x).sum(1).tolist() == lengths.tolist()
    x[1:, 1] = torch.randn(3, 20)  # of the channels that are looked at first (0, 4, 8, 12) all are still padded
    assert counts_in(x) is None
    longer = torch.where(torch.arange(20) < 10, torch.randn(20), 0)  # ten positions, five in the other channels
    x[3, 1] = longer.flip(0) if side == "left" else longer
    assert counts_in(x).sum(1).tolist() == [20, 20, 20, 10]


def test_a_last_batch_of_one_is_left_out_and_the_other_rules_go_on():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(65, 3)), batch_size=32)
    findings = bn.check(model, data=loader)
    assert "BN204" in findings.codes
    assert not findings.failed
