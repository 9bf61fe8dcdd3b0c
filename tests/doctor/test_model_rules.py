"""The rules on the model itself: how grave a case is, whether the numbers are right, what a repair keeps."""

import copy
import importlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import batchnorm as bn
from batchnorm.doctor.codes import FILES
from batchnorm.doctor.rules.low_precision_statistics import _raise
from batchnorm.doctor.subject import Subject

# Of every case: the severity of its gravest finding, and what can be done about it.
GRADES = {
    "BN102": {
        "all parameters": "warning safe", "AdamW": "advice safe", "Adam": "advice safe", "named": "advice safe",
        "with a schedule": "advice unsafe", "frozen, with gradients left over": "advice safe",
    },
    "BN103": {
        "tracking turned off later": "warning safe", "of a subclass": "warning none", "no buffers": "warning safe",
        "one buffer": "error none", "instance norm": "error safe", "a switch without statistics": "error none",
        "an update of nothing": "warning safe", "momentum 0": "warning safe",
        "momentum 0 after training": "advice safe", "one example alone raises": "advice none",
    },
    "BN104": {
        "MaxViT": "warning safe", "not surely Keras's": "warning unsafe", "the last batch": "advice none",
        "above one": "error none", "below zero": "error none", "a momentum in eps's place": "warning none",
        "no eps": "error none",
    },
    "BN105": {
        "no gradients": "warning unsafe", "the whole model": "advice unsafe", "eval()": "advice safe",
        "a subclass": "warning unsafe", "eval() and no gradients": "advice safe",
    },
    "BN106": {"converted": "warning safe", "a subclass": "warning none"},
    "BN107": {
        "an activation": "error unsafe", "without the model before": "error none", "not yet converted": "advice none",
    },
    "BN108": {
        "other means": "warning none", "other variances": "warning none", "steps in time": "warning none",
        "levels of a pyramid": "warning none", "two domains through an encoder": "warning none",
        "too few to tell": "advice none",
    },
    "BN109": {
        "bfloat16": "warning safe", "evaluation": "advice safe", "variances that are zero": "warning safe",
        "variances that are infinite": "error safe", "gamma and beta": "advice safe", "a checkpoint": "advice none",
    },
    "BN110": {
        "features that are far apart": "warning none", "linear": "advice none", "an embedding": "warning none",
        "a recurrent layer": "warning none", "a reshape instead of a transposition": "warning none",
    },
    "BN111": {
        "opacus": "error unsafe", "maps of one pixel": "warning unsafe", "one channel": "error none",
        "instance norm that tracks": "error none", "batch norm, one row": "advice none",
    },
    "BN112": {
        "directly": "warning none", "a little": "advice none", "a function": "warning none",
        "behind an activation that hardly ever fires": "advice none",
    },
    "BN113": {"gamma": "advice none", "zero as a whole, after training": "advice none"},
    "BN114": {"a module": "warning none", "maps": "warning none", "the last layer, with labels": "advice none"},
    "BN115": {
        "DCGAN": "warning unsafe", "a checkpoint": "warning unsafe", "a wide one": "advice none",
        "trained for a while": "warning none",
    },
}  # fmt: skip


def case(code, name, kind="SICK"):
    torch.manual_seed(0)
    return getattr(importlib.import_module(f"doctor_cases.{FILES[code]}"), kind)[name]()


def found(arguments, code):
    return bn.check(**arguments, select=[code])


@pytest.mark.parametrize(("code", "name"), [(c, n) for c, names in GRADES.items() for n in names])
def test_how_grave_it_is(code, name):
    findings = found(case(code, name), code)
    if code == "BN106" and torch.cuda.is_available():
        pytest.skip("where there are GPUs, the model may yet go there")
    assert f"{findings[0].severity} {findings[0].fix}" == GRADES[code][name]


# ---- BN102


def test_split_groups_keep_their_settings_and_state():
    arguments = case("BN102", "named")
    model, optimizer = arguments["model"], arguments["optimizer"]
    optimizer.param_groups[0]["momentum"] = 0.5
    model(torch.randn(4, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    names = {id(p): name for name, p in model.named_parameters()}
    before = {names[id(p)]: s["momentum_buffer"].clone() for p, s in optimizer.state.items()}
    repaired, report = bn.fix(model, found(arguments, "BN102"))
    assert report.paths == ("1", "5")
    groups = optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [1e-4, 0.0]
    assert [g["momentum"] for g in groups] == [0.5, 0.5]
    assert [g["param_names"] for g in groups] == [
        ["0.weight", "4.weight", "4.bias"], ["1.weight", "1.bias", "5.weight", "5.bias"],
    ]  # fmt: skip
    names = {id(p): name for name, p in repaired.named_parameters()}
    for group in groups:
        assert [names[id(p)] for p in group["params"]] == group["param_names"]
    for parameter, state in optimizer.state.items():
        torch.testing.assert_close(state["momentum_buffer"], before[names[id(parameter)]])
    optimizer.zero_grad()
    repaired(torch.randn(4, 3, 6, 6)).square().mean().backward()
    optimizer.step()


def test_a_group_of_norms_alone_only_loses_its_decay():
    arguments = case("BN102", "a group of norms alone")
    bn.fix(arguments["model"], found(arguments, "BN102"))
    assert [(g["weight_decay"], len(g["params"])) for g in arguments["optimizer"].param_groups] == [(1e-4, 1), (0.0, 2)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_decay_halves_gamma_in_as_many_steps_as_it_says(momentum):
    layer = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.05 * (1 - momentum) / 5, momentum=momentum)
    (finding,) = bn.check(layer, optimizer=optimizer, select=["BN102"])
    for _ in range(finding.numbers["steps_to_half"]):
        layer.weight.grad = torch.zeros(3)
        optimizer.step()
    assert float(layer.weight.detach()[0]) == pytest.approx(0.5, abs=0.02)


# ---- BN103


@pytest.mark.parametrize(
    "name", ["tracking turned off later", "no buffers", "an update of nothing", "momentum 0 after training"]
)
def test_explicit_switches_do_what_the_flags_did(name):
    arguments = case("BN103", name)
    model, x = arguments["model"], arguments["example"]
    repaired, _ = bn.fix(model, found(arguments, "BN103"))
    for training in (True, False):
        torch.testing.assert_close(repaired.train(training)(x), model.train(training)(x))
    for key, value in repaired.state_dict().items():
        if "num_batches" not in key:
            torch.testing.assert_close(value, model.state_dict()[key])


def test_it_says_how_far_the_buffers_are_from_the_example():
    layer = nn.BatchNorm1d(2)
    layer.running_mean.fill_(3.0)
    layer.track_running_stats = False
    x = torch.randn(4096, 2)
    (finding,) = bn.check(nn.Sequential(layer), x, select=["BN103"])
    assert finding.numbers["mean_off"] == pytest.approx(3.0, abs=0.1)
    assert f"{finding.numbers['mean_off']:.2g} standard deviations" in finding.sentence


# ---- BN104


def test_the_momentum_is_turned_round_and_evaluation_is_the_same():
    arguments = case("BN104", "MaxViT")
    findings = found(arguments, "BN104")
    assert findings[0].numbers["batches"] == pytest.approx(1.01 / 0.99)
    repaired, report = bn.fix(arguments["model"], findings)
    assert repaired[0].momentum == pytest.approx(0.01)
    assert report.certificate.absolute == 0.0


def test_the_average_has_the_variance_of_as_many_batches_as_it_says():
    momentum = 0.6
    weights = momentum * (1 - momentum) ** torch.arange(60, dtype=torch.float64)
    (finding,) = bn.check(nn.BatchNorm1d(2, momentum=momentum), select=["BN104"])
    assert finding.numbers["batches"] == pytest.approx(1 / float(weights.square().sum()), rel=1e-6)


def test_a_large_eps_is_compared_with_variances_that_were_measured_only():
    model = nn.BatchNorm2d(3, 0.8)
    (new,) = bn.check(model, select=["BN104"])
    assert "share_below" not in new.numbers
    assert "below it" not in new.sentence
    assert "momentum=0.2 " in new.repair
    model.running_var.copy_(torch.tensor([2.0, 0.1, 0.1]))
    (measured,) = bn.check(model, select=["BN104"])
    assert measured.numbers["share_below"] == pytest.approx(2 / 3)
    assert "67% of the channels" in measured.sentence


@pytest.mark.parametrize(
    ("variance", "severity", "shrinks"), [(100.0, "advice", 0.0), (1e4, "advice", 0.0), (0.1, "warning", 0.05)]
)
def test_a_large_eps_is_as_grave_as_what_it_takes_from_the_channels(variance, severity, shrinks):
    model = nn.BatchNorm2d(3, 0.01)
    model.running_var.fill_(variance)
    (finding,) = bn.check(model, select=["BN104"])
    assert finding.severity == severity
    assert finding.numbers["shrinks"] == pytest.approx(shrinks, abs=0.005)
    x = variance**0.5 * torch.randn(64, 3, 8, 8)
    size = float(model.eval()(x).detach().std() / (x / variance**0.5).std())
    assert 1 - size == pytest.approx(finding.numbers["shrinks"], abs=1e-3)


# ---- BN105


def test_a_layer_in_evaluation_mode_stays_so_and_goes_on_to_learn():
    arguments = case("BN105", "eval()")
    model, x = arguments["model"], arguments["example"]
    repaired, report = bn.fix(model, found(arguments, "BN105"))
    assert report.paths == ("backbone.1",)
    before = model.backbone(x)
    repaired.train()
    torch.testing.assert_close(repaired.backbone(x), before)
    assert int(repaired.backbone[1].num_batches_tracked) == 0
    assert repaired.backbone[1].weight.requires_grad


def test_every_frozen_layer_is_named_once():
    model = case("BN105", "no gradients")["model"]
    model.head[1].requires_grad_(False)
    assert [f.path for f in bn.check(model, select=["BN105"])] == ["backbone.1", "head.1"]


# ---- BN106


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_with_a_process_group_it_raises_and_ours_does_not(group):
    arguments = case("BN106", "converted")
    findings = found(arguments, "BN106")
    assert {f.severity for f in findings} == {"error"}
    assert "raises here" in findings[0].sentence
    repaired, _ = bn.fix(arguments["model"], findings)
    repaired.train()(arguments["example"])
    assert repaired[1]._path == "1"


def test_nobody_waits_for_ranks_that_do_not_look(group):
    model = nn.Sequential(nn.Dropout(0.5), bn.SyncBatchNorm(4))
    assert Subject(model).waits
    assert not Subject(model, process_group=dist.group.WORLD).waits
    assert not Subject(nn.Sequential(nn.BatchNorm1d(4))).waits
    assert bn.check(model, torch.randn(64, 4), select=["BN112"]).codes == ("BN112",)


# ---- BN107


def test_what_was_lost_comes_back_with_the_tensors_of_now():
    arguments = case("BN107", "an activation")
    model, before = arguments["model"], arguments["before"]
    state = copy.deepcopy(before.state_dict())
    repaired, _ = bn.fix(model, found(arguments, "BN107"), unsafe=True)
    expected = copy.deepcopy(before)
    expected.load_state_dict(model.state_dict())
    x = arguments["example"]
    torch.testing.assert_close(repaired.eval()(x), expected.eval()(x))
    assert [type(layer).__name__ for layer in repaired][1] == "SyncNormAct"
    for key, value in before.state_dict().items():
        torch.testing.assert_close(value, state[key])
    assert before.training


def test_the_loss_is_measured():
    (finding, _) = found(case("BN107", "nothing left to see"), "BN107")
    assert finding.numbers["change"] == pytest.approx(0.5)  # twice as much was made before


def test_parameters_stay_those_that_the_optimiser_holds():
    arguments = case("BN107", "an activation")
    optimizer = torch.optim.SGD(arguments["model"].parameters(), lr=0.1)
    findings = bn.check(**arguments, optimizer=optimizer, select=["BN107"])
    repaired, _ = bn.fix(arguments["model"], findings, unsafe=True)
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in repaired.parameters()}


def test_ranks_are_a_reason_to_look_at_what_torchs_conversion_would_lose(group):
    model = case("BN107", "not converted", "HEALTHY")["model"]
    assert not bn.check(model, select=["BN107"])
    findings = bn.check(model, select=["BN107"], process_group=dist.group.WORLD)
    assert [(f.path, f.severity) for f in findings] == [("1", "advice"), ("3", "advice")]


# ---- BN108


def test_how_far_the_calls_are_apart():
    torch.manual_seed(0)
    siamese = importlib.import_module("doctor_cases.shared_norm").Siamese()
    (finding,) = bn.check(siamese, (torch.randn(4096, 5), 2 * torch.randn(4096, 5) + 3), select=["BN108"])
    assert finding.numbers["mean_apart"] == pytest.approx(3 / math.sqrt(2.5), rel=0.05)
    assert finding.numbers["variance_ratio"] == pytest.approx(4.0, rel=0.15)
    assert finding.numbers["calls"] == 2


def test_an_encoder_that_is_called_with_too_few_examples_is_one_finding():
    (finding,) = found(case("BN108", "an encoder, too few to tell"), "BN108")
    assert finding.numbers["layers"] == 2
    assert "2 examples are too few to tell" in finding.sentence


# ---- BN109


def test_raised_tensors_train_with_the_state_they_had():
    arguments = case("BN109", "an optimiser with state")
    model, optimizer, x = arguments["model"], arguments["optimizer"], arguments["example"]
    expected = model.eval()(x)
    model.train()
    repaired, _ = bn.fix(model, found(arguments, "BN109"))
    assert {t.dtype for t in [*repaired[1].parameters(), *repaired[1].buffers()]} == {torch.float32, torch.int64}
    assert repaired[0].weight.dtype == torch.bfloat16
    state = optimizer.state[repaired[1].weight]
    assert state["momentum_buffer"].dtype == torch.float32
    assert repaired[1].weight.grad is None or repaired[1].weight.grad.dtype == torch.float32
    torch.testing.assert_close(repaired.eval()(x), expected, atol=0.02, rtol=0.02)
    repaired.train()(x).float().square().mean().backward()
    optimizer.step()


def test_gradients_are_raised_too():
    layer = nn.BatchNorm1d(2).bfloat16()
    layer.weight.grad = torch.ones(2, dtype=torch.bfloat16)
    _raise(layer)
    torch.testing.assert_close(layer.weight.grad, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_within_what_it_says_is_lost(dtype):
    layer = nn.BatchNorm1d(1).to(dtype)
    (finding,) = bn.check(layer, select=["BN109"])
    within = finding.numbers["update_lost_within"]
    running = torch.tensor(1.0, dtype=dtype)
    near, far = (torch.tensor(1 + f * within) for f in (0.9, 4.0))
    assert (running.float() * 0.9 + 0.1 * near).to(dtype) == running
    assert (running.float() * 0.9 + 0.1 * far).to(dtype) != running


# ---- BN111


def test_groups_are_as_large_as_they_should_be():
    for channels, groups in ((4, 1), (7, 1), (32, 2), (48, 3), (34, 2)):
        model = nn.Sequential(nn.GroupNorm(channels, channels))
        findings = bn.check(model, torch.randn(4, channels), select=["BN111"])
        repaired, _ = bn.fix(model, findings, unsafe=True)
        assert repaired[0].num_groups == groups


# ---- BN112


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_the_shift_is_what_the_paper_says(p):
    """Directly behind dropout, values of mean zero have 1 / (1 - p) times the variance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(p), nn.BatchNorm1d(8))
    (finding,) = bn.check(model, torch.randn(4096, 8), select=["BN112"])
    assert finding.numbers["variance_ratio"] == pytest.approx(1 / (1 - p), rel=0.03)


# ---- BN113


def test_channels_are_counted_once():
    (finding,) = found(case("BN113", "both, in one channel"), "BN113")
    assert (finding.numbers["dead"], finding.numbers["which"]) == (1, [1])
    (finding,) = found(case("BN113", "variance"), "BN113")
    assert (finding.numbers["dead"], finding.numbers["which"]) == (3, [1, 4, 5])


# ---- BN114


def test_the_ranges_are_those_of_the_softmax_and_of_the_layer():
    arguments = case("BN114", "a module")
    (finding,) = found(arguments, "BN114")
    assert finding.path == "5"
    assert 0 <= finding.numbers["input_low"] < finding.numbers["input_high"] <= 1
    assert finding.numbers["input_mean"] == pytest.approx(1 / 5)
    made = arguments["model"].train()(arguments["example"])
    assert finding.numbers["negative"] == pytest.approx(float((made < 0).float().mean()))
    assert finding.numbers["output_high"] == pytest.approx(float(made.max().detach()), rel=1e-4)


def test_scores_of_a_norm_are_right_and_unsure():
    (finding,) = found(case("BN114", "the last layer, with labels"), "BN114")
    assert finding.numbers["accuracy"] > 0.9
    assert finding.numbers["probability"] < 0.75
    assert finding.numbers["classes"] == 5


# ---- BN115


def test_repaired_gammas_are_those_of_dcgan_and_the_optimiser_keeps_them():
    arguments = case("BN115", "DCGAN")
    model = arguments["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repaired, _ = bn.fix(model, found(arguments, "BN115"), optimizer=optimizer, unsafe=True)
    for path in ("1", "4"):
        gamma = repaired.get_submodule(path).weight
        torch.testing.assert_close(gamma, model.get_submodule(path).weight + 1)
        assert any(gamma is p for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("code", [code for code in FILES if code.startswith("BN1")])
@pytest.mark.parametrize("kind", ["no norm", "no parameters", "one shared layer", "meta", "steps in time"])
def test_nothing_is_said_of_odd_models_and_nothing_breaks(code, kind):
    torch.manual_seed(0)
    layer, linear = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
    model, x = {
        "no norm": (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)),
        "no parameters": (nn.Sequential(nn.Flatten()), torch.randn(8, 4)),
        "one shared layer": (nn.ModuleDict({"a": nn.Sequential(layer), "b": layer}), None),
        "meta": (nn.Sequential(linear, layer).to("meta") if kind == "meta" else None, torch.randn(8, 4).to("meta")),
        "steps in time": (bn.BatchNormLSTM(4, 4), None),
    }[kind]  # fmt: skip
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    findings = bn.check(model, x, optimizer=optimizer, select=[code])
    assert not findings.failed
    assert not findings, str(findings)


def test_only_the_biases_that_were_found_are_dropped():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    )
    findings = bn.check(model, torch.randn(8, 3), select=["BN101"])
    assert [finding.path for finding in findings] == ["0", "3"]
    repaired, report = bn.fix(model, findings.without({"3": ["BN101"]}), example=torch.randn(8, 3))
    assert [repaired[i].bias is None for i in (0, 3, 6)] == [True, False, False]
    assert report.paths == ("0", "1")
    assert torch.equal(repaired[4].running_mean, model[4].running_mean)
    assert report.left == {}
    repaired, _ = bn.fix(repaired, bn.check(repaired, torch.randn(8, 3), select=["BN101"]))
    assert [repaired[i].bias is None for i in (0, 3, 6)] == [True, True, False]


def test_a_shared_layer_is_the_one_that_was_found():
    layer = nn.Linear(3, 4)
    model = nn.ModuleDict({"a": nn.Sequential(layer, nn.BatchNorm1d(4)), "b": layer})
    lean, _ = bn.drop_bias(model, torch.randn(8, 3), forward=lambda m, x: m["a"](x), modules="b")
    assert lean["b"].bias is None
    with pytest.raises(bn.BatchNormError, match="the model has no module 'c'"):
        bn.drop_bias(model, torch.randn(8, 3), forward=lambda m, x: m["a"](x), modules=["c"])
