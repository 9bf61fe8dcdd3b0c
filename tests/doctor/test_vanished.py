"""Values that ruin a model, with the severity and the reason that the consequence deserves."""

import pytest
import torch
from doctor_cases import nonfinite_parameters, vanished_variance
from doctor_cases.vanished_variance import case, dead, images, one_example
from torch import nn

import batchnorm as bn

NUMBERS = ["BN113", "BN201", "BN202", "BN203", "BN208", "BN209", "BN502"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def graded(arguments, select=NUMBERS):
    findings = bn.check(**arguments, select=select)
    assert not findings.failed
    return {(finding.code, finding.path): finding.severity for finding in findings}


@pytest.mark.parametrize("path", ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("given", ["nothing", "example", "data", "checkpoint"])
def test_parameters_that_are_not_finite_are_errors_of_their_module(path, value, given):
    model = nonfinite_parameters.spoiled(path, value)["model"]
    x = torch.randn(4, 3, 6, 6)
    more = {"example": {"example": x}, "data": {"data": [x, x]}}.get(given, {})
    subject = model.state_dict() if given == "checkpoint" else model
    (error,) = bn.check(subject, **more).errors
    assert (error.code, error.path) == ("BN208", path.split(".")[0])
    names = {"1.weight": "gamma", "1.bias": "beta"}
    assert f"its {names.get(path, path.split('.')[1])} has 1 " in error.sentence
    with pytest.raises(AssertionError, match="BN208 nonfinite-parameters"):
        bn.testing.assert_healthy(subject, **more)


def test_every_module_is_named_and_its_values_counted():
    model = nonfinite_parameters.network()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
        model[1].weight[:2] = torch.tensor([float("nan"), float("inf")])
    findings = bn.check(model, select=["BN208"])
    assert [(f.path, f.numbers["nan"], f.numbers["infinite"]) for f in findings] == [("0", 162, 0), ("1", 1, 1)]
    assert "its gamma has 1 NaN and 1 infinite values of 6" in findings[1].sentence
    assert model.eval()(torch.randn(2, 3, 6, 6)).isnan().all()  # the consequence


def test_an_infinite_gamma_is_no_dead_channel():
    assert graded(nonfinite_parameters.spoiled("1.weight", float("inf"))) == {("BN208", "1"): "error"}


def test_what_a_nan_weight_does_is_not_blamed_on_the_data():
    arguments = nonfinite_parameters.spoiled("0.weight")
    x = torch.randn(4, 3, 6, 6)
    x[0, 0] = float("nan")
    assert bn.check(**arguments, data=[x], select=["BN2"]).codes == ("BN208",)
    assert bn.check(nonfinite_parameters.network(), data=[x], select=["BN2"]).codes == ("BN203",)


@pytest.mark.parametrize(
    ("value", "live", "expected"),
    [
        (0.0, True, {("BN209", "1"): "error"}),
        (-1e-9, True, {("BN209", "1"): "error"}),
        (1e-12, True, {("BN209", "1"): "error"}),
        (1e-4, True, {("BN209", "1"): "error"}),
        (0.0, False, {("BN113", "1"): "advice"}),
        (1e-12, False, {("BN113", "1"): "advice"}),
        (-1e-9, False, {("BN113", "1"): "advice"}),
        (-1.0, True, {("BN203", "1"): "error"}),
        (-1.0, False, {("BN203", "1"): "error"}),
        (1.0, True, {}),
    ],
)
@pytest.mark.parametrize("given", ["example", "data"])
def test_a_small_variance_is_judged_by_its_input(value, live, expected, given):
    arguments = case([], 0.0) if live else dead(1)
    arguments["model"][1].running_var[0] = value
    arguments = one_example(arguments) if given == "example" else arguments
    assert graded(arguments, ["BN113", "BN202", "BN203", "BN208", "BN209"]) == expected


def test_without_an_example_nothing_is_claimed_of_the_input():
    model = case([2], 0.0)["model"]
    (finding,) = bn.check(model, select=NUMBERS)
    assert finding.sentence == "1 of its 8 channels seem to carry nothing: 1 has a running variance of about zero"
    assert "give an example" in finding.repair
    (finding,) = bn.check(**one_example(dead()), select=["BN113"])
    assert finding.sentence == "4 of its 8 channels carry nothing: 4 have an input that hardly varies"
    assert not bn.check(model, torch.zeros(8, 6), select=["BN209"])  # such an example shows nothing
    assert "seem to" in bn.check(model, torch.zeros(8, 6), select=["BN113"])[0].sentence
    assert graded({"model": case(slice(None), 0.0)["model"]}) == {("BN209", "1"): "warning"}


def test_an_eps_that_is_far_too_large_is_no_vanished_variance():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, 0.8), nn.ReLU())  # eps where the momentum was meant
    for variance, expected in ((3e-3, {"BN104"}), (1e-6, {"BN104", "BN209"})):
        model[1].running_var.fill_(variance)
        model[1].num_batches_tracked.fill_(9)
        assert set(bn.check(model, select="BN104,BN113,BN209").codes) == expected


def test_the_amplification_is_what_evaluation_gives():
    arguments = one_example(case([2], 0.0), 4096)
    arguments["example"] = torch.randn(4096, 6)
    (finding,) = bn.check(**arguments, select=["BN209"])
    assert finding.numbers["channel"] == 2
    assert finding.numbers["vanished"] == 1
    model = arguments["model"]
    evaluated = model[1](model[0](arguments["example"]))
    assert finding.numbers["amplified"] == pytest.approx(float(evaluated.detach()[:, 2].std()), rel=0.01)
    assert finding.numbers["amplified"] > 300
    assert finding.numbers["others_amplified"] == pytest.approx(1.0, abs=0.2)


def test_an_example_unlike_the_training_data_is_a_warning():
    assert graded(case([2], 0.0, scale=20.0), ["BN209"]) == {("BN209", "1"): "warning"}
    assert graded(one_example(case([2], 0.0, scale=20.0)), ["BN209"]) == {("BN209", "1"): "advice"}
    shifted = case([2], 0.0)
    shifted["data"] = [x + 3 for x in shifted["data"]]
    assert graded(shifted, ["BN209"]) == {("BN209", "1"): "warning"}
    (finding,) = bn.check(**case([2], 0.0, scale=20.0), select=["BN209"])
    assert finding.numbers["others_amplified"] == pytest.approx(20.0, rel=0.2)
    assert "its other channels are off, too, by a factor of" in finding.sentence


@pytest.mark.parametrize("noise", [torch.randn, torch.rand])
def test_noise_that_wakes_dead_filters_of_a_trained_network_is_no_error(noise):
    """On drawings of edges two filters are off, as their statistics say; on noise they are not."""
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
        model[0].weight[:2] = torch.tensor([[1.0, -1, 1], [-1, 1, -1], [0, 0, 0]])  # gives nothing for columns
        model[0].bias[:2] = -0.5
        for _ in range(300):
            model(torch.rand(16, 1, 1, 12).round().expand(16, 1, 12, 12))
    columns = torch.rand(16, 1, 1, 12).round().expand(16, 1, 12, 12)
    assert not bn.check(model, columns, select=["BN209"])
    assert bn.check(model, columns, select=["BN113"])[0].numbers["which"] == [0, 1]
    found = graded({"model": model, "example": 3 * noise(16, 1, 12, 12)}, ["BN209"])
    assert found == {("BN209", "2"): "advice"}
    model[2].running_var[3] = 0.0
    assert graded({"model": model, "example": columns}, ["BN209"]) == {("BN209", "2"): "error"}


def test_a_wrong_variance_does_not_make_later_layers_suspect():
    arguments = case(slice(None), 0.0)
    assert [finding.path for finding in bn.check(**arguments, select=["BN209"])] == ["1"]


def test_one_image_is_enough():
    arguments = images(0.0)
    (finding,) = bn.check(arguments["model"], arguments["example"], select=["BN209"])
    assert (finding.severity, finding.numbers["which"]) == ("error", [2])


def test_only_what_is_wrong_is_measured_anew():
    arguments = vanished_variance.case([2], 0.0)
    repaired, report = bn.fix(arguments["model"], bn.check(**arguments, select=["BN209"]), unsafe=True)
    assert report.paths == ("1",)
    assert torch.equal(repaired[4].running_var, arguments["model"][4].running_var)
    x = torch.cat(arguments["data"])
    exact = repaired[0](x).var(0)
    torch.testing.assert_close(repaired[1].running_var, exact, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, bn.BatchNorm2d, bn.FrozenBatchNorm, nn.SyncBatchNorm])
def test_kinds_of_layers(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU())
    model[1].running_var[:] = torch.tensor([0.0, 0.4, 0.3, 0.3])
    model[1].running_mean[:] = 0.01
    assert graded({"model": model.eval(), "example": torch.randn(8, 3, 8, 8)}, ["BN209"]) == {("BN209", "1"): "error"}


def test_a_layer_that_cannot_be_folded_for_nan_weights_says_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[0].weight.data[0, 0] = float("nan")
    model[1].num_batches_tracked.fill_(5)
    (finding,) = bn.check(model, torch.randn(2, 3, 8, 8), select=["BN502"])
    assert "the weights of 0 are not finite" in finding.sentence
    assert "would not fit" not in finding.sentence
