"""The calibrated match of `convert`, and the optimisers that follow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from convert_cases import NormAct, images, network, worn
from torch import nn

import batchnorm as bn
from batchnorm.lab.data import digits
from peer_models import subject

LOST = ("group", "layer", "instance", "rms", "dyt", "filter-response")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def moments(model, layer, batches, before_activation):
    """Mean and variance per channel of what a layer gives, over all batches, in float64."""
    seen = []

    def look(module, given, result):
        twin = copy.deepcopy(module)
        twin._forward_hooks.clear()
        if before_activation and hasattr(twin, "activation"):
            twin.activation = None
            if getattr(twin, "tau", None) is not None:
                twin.tau = None
        if isinstance(twin, NormAct) or hasattr(twin, "run_after"):
            twin.drop = twin.act = nn.Identity()
        seen.append(twin(given[0]).double())

    handle = layer.register_forward_hook(look)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    values = torch.cat(seen).transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1, correction=0)


@pytest.mark.parametrize("to", LOST)
def test_means_and_variances_of_every_output_are_those_of_the_model_as_it_was(to):
    """In the converted model as a whole: each layer was measured behind layers that were converted and matched."""
    model = network().double()
    batches = [images(n).double() for n in (16, 5, 11)]
    plain, _ = bn.convert(model, to, example=batches[0])
    matched, report = bn.convert(model, to, data=iter(batches))
    for place in ("1", "4", "7"):
        if place in report.left:
            continue
        goal = moments(model, model.get_submodule(place), batches, True)
        found = moments(matched, matched.get_submodule(place), batches, True)
        off = moments(plain, plain.get_submodule(place), batches, True)
        for wanted, given, without in zip(goal, found, off, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-10)
            assert not torch.allclose(without, wanted, rtol=0.02, atol=0)
    assert {change.what for change in report.changes} >= {"class", "weight", "bias"}
    assert (matched[1].weight < 0).equal(model[1].weight < 0)
    assert not report.certificate.kept
    assert report.certificate.inputs == 3


def test_statistics_are_measured_where_there_were_none():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.InstanceNorm2d(6))
    model = model.double()
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].bias.normal_()
    batches = [images(9).double(), images(4).double()]
    changed, report = bn.convert(model, "batch", data=batches)
    assert [type(changed[i]) for i in (1, 4)] == [bn.BatchNorm2d, bn.BatchNorm2d]
    x = torch.cat(batches)
    h = changed[0](x)
    torch.testing.assert_close(changed[1].running_mean, h.mean((0, 2, 3)))
    torch.testing.assert_close(changed[1].running_var, h.var((0, 2, 3)))
    assert int(changed[1].num_batches_tracked) == 2
    changed.eval()
    # The second one saw what the first, converted and matched, gave it.
    h = changed[:4](x)
    torch.testing.assert_close(changed[4].running_mean, h.mean((0, 2, 3)))
    for i in (1, 4):
        goal, found = (moments(m.eval(), m[i], batches, True) for m in (model, changed))
        for wanted, given in zip(goal, found, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-10)
    assert "statistics None -> of 13 examples" in str(report)
    assert changed[4].weight.requires_grad  # an instance norm without gamma and beta gets some
    ghost, _ = bn.convert(model, "ghost", data=batches, virtual_batch_size=4)
    torch.testing.assert_close(ghost.eval()(x), changed(x))


def test_a_tensor_is_one_batch_and_tuples_give_their_first_entry():
    model, x = network(), images(16)
    one, _ = bn.convert(model, "group", data=x)
    two, _ = bn.convert(model, "group", data=[(x, torch.zeros(16))])
    three, _ = bn.convert(model, "group", data=[{"image": x}], forward=lambda model, batch: model(batch["image"]))
    for other in (two, three):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_the_data_do_not_reach():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.used(x)

    model = Branch().eval()
    changed, report = bn.convert(model, "layer", data=[torch.randn(8, 4)])
    assert report.paths == ("used", "unused")
    assert torch.equal(changed.unused.weight, model.unused.weight)
    _, report = bn.convert(changed, "batch", data=[torch.randn(8, 4)])
    assert report.paths == ("used",)
    assert "the data do not reach it" in report.left["unused"]


def test_a_channel_that_never_varies_keeps_its_gamma():
    model = nn.Sequential(nn.BatchNorm1d(3)).eval()
    x = torch.randn(16, 3)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([0.0, -2.0, 1.0]))
        model[0].bias.fill_(0.5)
    changed, _ = bn.convert(model, "none", data=[x])
    torch.testing.assert_close(changed(x), model(x))
    layer = nn.Sequential(nn.GroupNorm(1, 3))
    x[:, 1] = 4.0
    back, _ = bn.convert(layer, "batch", data=[x])
    assert all(torch.isfinite(p).all() for p in back.state_dict().values())
    # What gives nothing still has to be nothing.
    changed, _ = bn.convert(model, "layer", data=[x])
    assert changed[0].weight[0] == 0.0
    torch.testing.assert_close(changed[0].bias[0], torch.tensor(0.5))


def test_the_model_is_only_looked_at():
    model = network().train()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    bn.convert(model, "group", data=[images()], example=images())
    torch.set_rng_state(random)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_accuracy_is_lost_and_found():
    """A trained network loses much by plain conversion, and most of it comes back by the match, without training."""
    data = digits.load()
    x, y = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(80):
        chosen = slice(step * 64 % 1280, step * 64 % 1280 + 64)
        sgd.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        sgd.step()

    def accuracy(model):
        with torch.no_grad():
            scores = model.eval()(torch.from_numpy(data.validation_images))
        return (scores.argmax(1) == torch.from_numpy(data.validation_labels)).double().mean().item()

    stock = accuracy(model)
    plain = accuracy(bn.convert(model, "layer", example=x[:8])[0])
    matched = accuracy(bn.convert(model, "layer", data=x[:512].split(128))[0])
    assert stock > 0.95
    assert matched > plain + 0.5 * (stock - plain) > plain + 0.02


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("to", "gone", "new"), [("group", 0, 0), ("dyt", 0, 3), ("frozen", 6, 0), ("filter-response", 0, 1), ("sync", 0, 0)]
)
def test_optimisers_follow(to, gone, new, inplace):
    model = network().train()
    norms = [p for i in (1, 4, 7) for p in model[i].parameters()]
    others = [p for p in model.parameters() if all(p is not n for n in norms)]
    adam = torch.optim.Adam([{"params": others[2:], "lr": 0.5}, {"params": norms, "weight_decay": 0.0}], lr=0.1)
    sgd = torch.optim.SGD(others[:2], lr=0.3, momentum=0.9)
    model(images()).square().sum().backward()
    adam.step(), sgd.step()
    before = copy.deepcopy([adam.state_dict(), sgd.state_dict()])
    changed, _ = bn.convert(model, to, example=images(), optimizer=[adam, sgd], inplace=inplace)
    held = {id(p) for each in (adam, sgd) for group in each.param_groups for p in group["params"]}
    assert held == {id(p) for p in changed.parameters()}
    assert (changed is model) == inplace
    assert len(adam.param_groups[1]["params"]) == 6 - gone + new
    assert [group["lr"] for group in adam.param_groups] == [0.5, 0.1]
    assert len(adam.state) == len(before[0]["state"]) - gone
    if not gone:  # state went with its parameter
        for name in ("weight", "bias"):
            at = (
                [id(p) for p in norms].index(id(getattr(model[1], name))) if inplace else ["weight", "bias"].index(name)
            )
            kept = before[0]["state"][len(others) - 2 + at]["exp_avg"]
            assert torch.equal(adam.state[getattr(changed[1], name)]["exp_avg"], kept)
            assert getattr(changed[1], name).grad is not None
    if to != "sync":
        changed(images()).square().sum().backward()
        adam.step(), sgd.step()


def test_an_optimiser_that_failed_conversions_leave_alone():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [id(p) for p in sgd.param_groups[0]["params"]]
    with pytest.raises(bn.NotEquivalent):
        bn.convert(model, "dyt", example=images(), tolerance=1e-9, optimizer=sgd)
    assert [id(p) for p in sgd.param_groups[0]["params"]] == held


def test_new_parameters_of_a_layer_that_does_not_learn_are_not_trained():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    changed, _ = bn.convert(model, "dyt", optimizer=sgd)
    held = sgd.param_groups[0]["params"]
    assert all(p is not changed[1].alpha for p in held)  # its gamma is not trained either
    assert any(p is changed[2].alpha for p in held)  # beside nothing


def test_a_model_of_timm():
    """Its norms have drop and act inside."""
    model, x = subject("timm", "mobilenetv3_small_050")
    worn(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.abs_()
    changed, report = bn.convert(model, "none", example=x)
    assert report.certificate.kept
    assert not report.left
    assert any(hasattr(m, "run_after") for m in changed.modules())
    grouped, report = bn.convert(model, "group", where="blocks.1.*", example=x)
    assert report.paths
    assert all(path.startswith("blocks.1.") for path in report.paths)
    assert grouped(x).isfinite().all()
    back, _ = bn.convert(grouped, "batch", data=[torch.randn(4, 3, 96, 96)])
    assert [type(m) for m in back.modules()] == [type(m) for m in model.modules()]


class StyleNorm(nn.Module):
    """A norm by name that is called with two things."""

    def forward(self, x, style):
        return F.layer_norm(x, x.shape[1:]) * style


class Styled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 8, 3))
        self.bn = nn.BatchNorm2d(8)
        self.style = StyleNorm()

    def forward(self, x):
        return self.style(self.bn(self.conv(x)), 2.0)


@pytest.mark.parametrize("to", ["batch", "ghost", "group"])
def test_what_is_a_norm_by_name_only_may_be_called_in_any_way(to):
    model, data = worn(Styled()), [torch.randn(8, 1, 6, 6) for _ in range(2)]
    changed, report = bn.convert(model, to, data=data)
    assert not any("parametrizations" in path for path in (*report.left, *report.paths))  # it is part of the conv
    assert ("style" in report.left) is (to != "group")
    assert changed(data[0]).isfinite().all()
