"""`convert` between bricks: what stays of a layer, what is refused, and what the report says."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convert_cases import NormAct, images, network, worn
from torch import nn

import batchnorm as bn
from batchnorm.layers.group_counts import safe_groups
from batchnorm.layers.recurrent_norm import StepBatchNorm

KEPT = ("sync", "ghost", "renorm", "frozen", "masked", "none")
LOST = ("group", "layer", "instance", "rms", "dyt", "filter-response")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1.0


@pytest.mark.parametrize("to", KEPT)
def test_the_function_in_evaluation_is_kept_and_certified(to):
    model, x = network(), images()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed, report = bn.convert(model, to, example=x)
    assert report.paths == ("1", "4", "7")
    assert report.certificate.kept
    assert report.certificate.inputs == 3
    assert report.certificate.relative < 1e-5
    # Between these training is the same too, in one process.
    assert (report.gradients is not None) == (to in ("sync", "masked"))
    if to == "masked":
        assert "needs to know what is padding" in str(_raised(lambda: changed(x)))
    else:
        torch.testing.assert_close(changed(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    if to != "none":
        assert changed.state_dict().keys() == model.state_dict().keys()


def _raised(call):
    with pytest.raises(bn.BatchNormError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("to", LOST)
def test_where_the_function_cannot_be_kept_the_difference_is_measured(to):
    model, x = network(), images()
    changed, report = bn.convert(model, to, example=x)
    assert not report.certificate.kept
    assert "not expected to be equal" in str(report)
    assert report.certificate.absolute >= (changed(x) - model(x)).abs().max().item() * (1 - 1e-6) > 0.01
    assert report.gradients is None
    with pytest.raises(bn.NotEquivalent, match="convert: the outputs would differ"):
        bn.convert(model, to, example=x, tolerance=1e-6)
    assert [name for name in changed.state_dict() if "running" in name] == (
        ["7.running_mean", "7.running_var"] if to == "instance" else []
    )


@pytest.mark.parametrize("to", [*KEPT, *LOST])
def test_what_is_a_layer_s_own_stays(to):
    model = network().train()
    for layer in (model[1], model[4]):
        layer.weight.requires_grad_(False)
        layer.eval()
        layer.mine = "mine"
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    layer, gamma, beta = model[1], model[1].weight, model[1].bias
    same, _ = bn.convert(model, to, example=images(), inplace=True)
    assert same is model
    assert model[1] is layer
    assert layer.mine == "mine"
    assert not layer.training
    assert model.training
    if to != "frozen":
        assert layer.weight is gamma
        assert layer.bias is beta
        assert not gamma.requires_grad
        assert beta.requires_grad
    if to not in ("none", "dyt"):
        assert layer.eps == 1e-3
    if to in KEPT[:-1]:
        assert layer.momentum == 0.3
        assert int(layer.num_batches_tracked) == 7
    if to != "filter-response":  # whose threshold is another activation
        assert model[4].activation == "leaky_relu"
        assert model[4].negative_slope == 0.2
    if to != "masked":
        seen.clear()
        model(images())
        assert seen == [1]
        again = pickle.loads(pickle.dumps(copy.deepcopy(nn.Sequential(*model[2:]))))
        assert [type(m) for m in again] == [type(m) for m in model[2:]]


def reference(layer, x, to):
    """The converted layer in float64 NumPy, from the gamma, beta and eps of the layer as it was."""
    x = x.double().numpy()
    axes = {"group": (2, 3, 4), "layer": (1, 2, 3), "instance": (2, 3), "rms": (1, 2, 3)}[to]
    grouped = x.reshape(len(x), -1, 2, *x.shape[2:]) if to == "group" else x
    mean = 0.0 if to == "rms" else grouped.mean(axes, keepdims=True)
    var = ((grouped - mean) ** 2).mean(axes, keepdims=True)
    z = ((grouped - mean) / np.sqrt(var + layer.eps)).reshape(x.shape)
    gamma, beta = (p.detach().double().numpy()[:, None, None] for p in (layer.weight, layer.bias))
    return torch.from_numpy(z * gamma + beta)


@pytest.mark.parametrize("to", ["group", "layer", "instance", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gamma_beta_and_eps_are_used_as_they_were(to, dtype, layout):
    layer = worn(nn.BatchNorm2d(8, eps=0.1)).to(dtype)
    x = torch.randn(4, 8, 5, 5).to(dtype).contiguous(memory_format=layout)
    changed, _ = bn.convert(layer, to)
    y = changed(x)
    assert y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(y.double(), reference(layer, x, to), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("channels", "size", "wished", "groups"),
    [
        (4, 1, 4, 1),  # GroupNorm(4, 4) on 1x1 maps gives its bias, and two groups their signs
        (4, 8, 4, 4),
        (12, 1, 32, 4),
        (12, 2, 5, 4),
        (64, 8, None, 32),
        (24, 8, None, 12),
        (24, 8, 32, 24),
        (64, 1, None, 16),
        (37, 8, 32, 1),
        (6, 1, 6, 2),
    ],
)
def test_group_counts_are_safe(channels, size, wished, groups):
    model = worn(nn.Sequential(nn.BatchNorm2d(channels)))
    x = torch.randn(4, channels, size, size)
    options = {} if wished is None else {"groups": wished}
    changed, report = bn.convert(model, "group", example=x, **options)
    assert changed[0].num_groups == groups
    assert safe_groups(channels, wished, size * size) == groups
    message = next(change.after for change in report.changes if change.what == "groups")
    assert message.startswith(f"{groups} of {channels // groups} channels, {channels // groups * size**2} values each")
    assert ("wished" in message) == (wished is not None and wished != groups)
    z = (changed[0](x) - changed[0].bias.view(-1, 1, 1)) / changed[0].weight.view(-1, 1, 1)
    assert len(z.abs().detach().round(decimals=2).unique()) > 2  # neither nothing nor signs


def test_group_counts_without_an_example():
    changed, report = bn.convert(nn.Sequential(nn.BatchNorm2d(8)), "group", groups=8)
    assert changed[0].num_groups == 4  # two channels are safe on one position too
    assert report.certificate is None
    assert "4 of 2 channels, positions not known (8 wished)" in str(report)


@pytest.mark.parametrize("groups", [0, -1, 2.0, "4", True])
def test_group_counts_that_cannot_be(groups):
    with pytest.raises(bn.BatchNormError, match=rf"convert: groups is {re.escape(repr(groups))}; use a whole number"):
        bn.convert(network(), "group", groups=groups)


@pytest.mark.parametrize(
    ("to", "channels", "size", "message"),
    [
        ("group", 2, 1, "on 1 position, group norm has 2 values to normalise at once, and would leave their signs"),
        ("layer", 1, 1, "has 1 value to normalise at once, and would leave nothing of the input"),
        ("instance", 8, 1, "has 1 value to normalise at once, and would leave nothing of the input"),
        ("rms", 1, 1, "would leave its sign"),
        ("group", 1, None, "on an input of unknown size, .* give an example that says how many there are"),
    ],
)
def test_a_norm_that_would_erase_its_input_is_not_made(to, channels, size, message):
    model = nn.Sequential(nn.BatchNorm2d(channels))
    example = None if size is None else torch.randn(4, channels, size, size)
    changed, report = bn.convert(model, to, example=example)
    assert re.search(message, report.left["0"])
    assert type(changed[0]) is nn.BatchNorm2d
    assert report.certificate is None


def test_the_way_back_gives_the_class_and_its_settings():
    model, x = network(), images()
    for to in ("ghost", "renorm", "masked", "group", "rms", "dyt"):
        changed, _ = bn.convert(model, to, example=x)
        changed, _ = bn.convert(changed, "layer" if to == "group" else to, where="1", example=x)
        back, report = bn.convert(changed, "batch", data=[x, images()])
        assert [type(m) for m in back] == [type(m) for m in model], to
        assert report.paths == ("1", "4", "7")
        for old, new in zip(model, back, strict=True):
            assert {k for k in vars(old) if not k.startswith("_")} == {k for k in vars(new) if not k.startswith("_")}
        assert back[1].eps == 1e-3
        assert back[1].momentum == 0.3
        assert back[4].activation == "leaky_relu"
        assert back.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("to", ["group", "ghost", "frozen", "none"])
def test_a_class_with_an_activation_inside(to):
    model = worn(nn.Sequential(nn.Conv2d(3, 8, 3), NormAct(8)))
    x = images()
    changed, report = bn.convert(model, to, example=x)
    assert not report.left
    norm = changed[1]
    assert isinstance(
        norm, {"group": nn.GroupNorm, "ghost": bn.GhostBatchNorm, "frozen": bn.FrozenBatchNorm}.get(to, nn.Module)
    )
    assert isinstance(norm.act, nn.SiLU)
    assert report.certificate.kept == (to != "group")
    if to == "group":
        h = model[0](x)
        z = F.silu(F.group_norm(h, norm.num_groups, model[1].weight, model[1].bias, model[1].eps))
        torch.testing.assert_close(changed(x), z)
    twin = pickle.loads(pickle.dumps(changed))
    torch.testing.assert_close(twin(x), copy.deepcopy(changed)(x))
    if to != "frozen":
        changed.train()
        assert (changed(x) != changed(x)).any()  # it drops at random, as before
        back, _ = bn.convert(changed, "batch", data=[x])
        assert type(back[1]) is NormAct
        assert not bn.convert(back, "group")[1].left


def test_a_class_that_does_something_else_is_left():
    changed, report = bn.convert(nn.ModuleDict({"odd": Shifted(4), "plain": nn.BatchNorm2d(4)}), "group")
    assert report.paths == ("plain",)
    assert "Shifted does something else than batch norm followed by the modules in it" in report.left["odd"]
    assert type(changed["odd"]) is Shifted


def test_what_is_left_has_its_reason():
    model = nn.ModuleDict(
        {
            "lazy": nn.LazyBatchNorm2d(), "frozen": bn.FrozenBatchNorm(4), "steps": StepBatchNorm(4),
            "group": nn.GroupNorm(2, 4), "masked": bn.MaskedBatchNorm(4), "domains": bn.DomainBatchNorm(4),
            "tied": nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(4), "weight"),
            "ghost": bn.GhostBatchNorm(4),
        }
    )  # fmt: skip
    _, report = bn.convert(model, "layer", inplace=True)
    assert report.paths == ("ghost",)
    message = {
        "lazy": "does not know its channels", "frozen": "unfreeze it first", "steps": "for every time step",
        "group": "a GroupNorm is not a batch norm: name it in where=", "masked": "it is called with a mask",
        "domains.domain_source": "a part of a DomainBatchNorm", "tied": "computed from others",
    }  # fmt: skip
    for path, words in message.items():
        assert words in report.left[path], path
    untracked = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), bn.GhostBatchNorm(3))
    for to in ("frozen", "none", "renorm"):
        assert bn.convert(untracked, to)[1].left["0"] == "it has no running statistics"
    assert bn.convert(untracked, "ghost")[1].left["1"] == "it is ghost norm already"
    assert bn.convert(untracked, "ghost", virtual_batch_size=3)[0][1].virtual_batch_size == 3
    assert "give data=" in bn.convert(nn.Sequential(nn.GroupNorm(2, 4)), "batch")[1].left["0"]


def test_a_model_without_norms():
    model, report = bn.convert(nn.Sequential(nn.Linear(2, 2)), "group", example=torch.randn(3, 2))
    assert str(report) == "no modules changed"
    assert bn.convert(model, "batch", data=[torch.randn(3, 2)])[1].changes == ()


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("1", ("1",)),
        (["4", "7"], ("4", "7")),
        ("[14]", ("1", "4")),
        (lambda path, module: isinstance(module, nn.BatchNorm1d), ("7",)),
        ("", ("1", "4", "7")),
        ("*", ("1", "4", "7")),
    ],
    ids=str,
)
def test_where(where, paths):
    assert bn.convert(network(), "ghost", where)[1].paths == paths
    nested = nn.ModuleDict({"body": network(), "head": nn.BatchNorm1d(3)})
    if isinstance(where, str) and where == "1":
        nested["body2"] = nn.BatchNorm1d(3)  # whose name only begins like it
        assert bn.convert(nested, "ghost", "body")[1].paths == ("body.1", "body.4", "body.7")
        assert bn.convert(nested, "ghost", "body.?")[1].paths == ("body.1", "body.4", "body.7")


def test_where_names_other_norms():
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(5), nn.LocalResponseNorm(2))
    x = torch.randn(3, 4, 5)
    changed, report = bn.convert(model, "instance", "*", example=x)
    assert type(changed[0]) is nn.InstanceNorm1d
    assert "normalises the last axes" in report.left["1"]
    assert report.left["2"] == "a LocalResponseNorm is none of the bricks"
    features = nn.Sequential(nn.LayerNorm(5))
    assert "without an example it is unknown" in bn.convert(features, "rms", "*")[1].left["0"]
    assert type(bn.convert(features, "rms", "*", example=torch.randn(3, 5))[0][0]).__name__ == "RMSNorm"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: bn.convert(m, "grup"), "convert: there is no norm 'grup'; did you mean 'group'"),
        (lambda m: bn.convert(m, nn.GroupNorm), "convert: there is no norm <class"),
        (lambda m: bn.convert(m, "weight"), "weight normalisation is of the layer before"),
        (lambda m: bn.convert(m, "group", "bn1"), "the model has no module 'bn1'"),
        (lambda m: bn.convert(nn.ModuleDict({"norm": m}), "group", "norn"), "did you mean 'norm'"),
        (lambda m: bn.convert(m, "group", process_group=3), "a group norm has no process_group"),
        (lambda m: bn.convert(m, "group", size=3), "convert: .*unexpected keyword argument 'size'"),
        (lambda m: bn.convert(m, "sync", groups=3), "sync has no option 'groups'"),
        (lambda m: bn.convert(m, "group", data=[]), "there are no batches"),
        (lambda m: bn.convert(m, "dyt", optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())), "holds no parameter"),
        (lambda m: bn.convert(m, "group", data=[images() * float("nan")]), "convert: 1: it meets NaN or infinite"),
    ],
)  # fmt: skip
def test_mistakes(call, message):
    with pytest.raises(bn.BatchNormError, match=message):
        call(network())


def test_a_failure_in_place_leaves_the_model_as_it_was():
    model, x = network().train(), images()
    kinds, own = [type(m) for m in model.modules()], [dict(vars(m)) for m in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(bn.NotEquivalent):
            bn.convert(model, "group", data=[x, images()], tolerance=1e-9, inplace=True)
        assert [type(m) for m in model.modules()] == kinds
        assert [dict(vars(m)) for m in model.modules()] == own
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training


def test_not_equivalent_names_the_module(monkeypatch):
    from batchnorm.layers import ghost

    monkeypatch.setattr(
        ghost.GhostBatchNorm, "eps", property(lambda self: 0.5, lambda self, value: None), raising=False
    )
    with pytest.raises(bn.NotEquivalent, match="they part at 1;"):
        bn.convert(network(), "ghost", example=images())


def test_in_training_mode_the_certificate_is_of_evaluation():
    model = network().train()
    _, report = bn.convert(model, "ghost", example=images())
    assert report.certificate.kept
    assert all(m.training for m in model.modules())
    _, report = bn.convert(network(), "sync", example=images(1))  # one example: nothing to train the dense norm with
    assert report.certificate.kept
    assert report.gradients is None


def test_statistics_of_the_batch_are_not_kept_by_ghost_batches():
    """Switched to the batch's own statistics, evaluation depends on what a batch is."""
    model = worn(nn.Sequential(bn.BatchNorm1d(3, statistics="batch")))
    _, report = bn.convert(model, "ghost", example=torch.randn(8, 3), virtual_batch_size=2)
    assert not report.certificate.kept
    assert report.certificate.relative > 0.01
    _, report = bn.convert(model, "masked", example=torch.randn(8, 3))
    assert report.certificate.kept


def test_shared_layers_are_converted_once():
    layer = nn.BatchNorm1d(6)
    model = nn.Sequential(layer, nn.Linear(6, 6), layer)
    changed, report = bn.convert(model, "layer", example=torch.randn(4, 6))
    assert report.paths == ("0",)
    assert changed[0] is changed[2]
    alone, report = bn.convert(layer, "layer")
    assert report.paths == ("",)
    assert type(alone) is nn.GroupNorm


def test_residuals_still_fit():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = worn(bn.BatchNorm2d(3))

        def forward(self, x):
            return self.norm(x, residual=x)

    block = Block().eval()
    x = images()
    changed, _ = bn.convert(block, "group", example=x)
    norm = block.norm
    expected = F.group_norm(x, 1, norm.weight, norm.bias, norm.eps) + x
    torch.testing.assert_close(changed(x), expected)


def test_none_without_gamma_and_beta():
    model = worn(nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    x = torch.randn(5, 3)
    changed, report = bn.convert(model, "none", example=x)
    torch.testing.assert_close(changed(x), model(x))
    assert "learns nothing -> weight, bias" in str(report)
    changed, report = bn.convert(model, "none", example=x, affine=False)
    assert type(changed[0]) is nn.Identity
    assert not report.certificate.kept
    for to in ("group", "layer", "rms", "dyt", "filter-response"):
        plain, _ = bn.convert(model, to, example=x)
        assert not {"weight", "bias"} & dict(plain[0].named_parameters()).keys(), to


def test_synchronised_layers():
    synced, _ = bn.convert(worn(nn.Sequential(nn.BatchNorm2d(4), Shifted(4), nn.SyncBatchNorm(4))), "sync")
    changed, report = bn.convert(synced, "group")
    assert report.paths == ("0", "2")
    assert all(isinstance(changed[at], nn.GroupNorm) for at in (0, 2))
    assert type(changed[1]) is type(synced[1])  # still synchronised
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(changed[1](x), synced[1](x))
    back, _ = bn.convert(changed, "batch", data=[x])
    assert [type(layer) for layer in back][:2] == [nn.BatchNorm2d, Shifted]
