"""Parameter groups: what decays and what does not, by the kind of layer and not by luck of the shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.layers.channel_norms import ChannelAffine, RMSNorm


def names(model, weight_decay=0.1, **options):
    """The names in each group."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    decay, spared = bn.param_groups(model, weight_decay, **options)
    return [by_parameter[p] for p in decay["params"]], [by_parameter[p] for p in spared["params"]]


def test_groups():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1))
    groups = bn.param_groups(model, 0.05, lr=0.3, momentum=0.9)
    assert [group["name"] for group in groups] == ["decay", "no_decay"]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    assert all(group["lr"] == 0.3 and group["momentum"] == 0.9 for group in groups)
    assert names(model) == (["0.weight", "3.weight"], ["0.bias", "1.weight", "1.bias", "3.bias"])


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4), nn.LayerNorm((4, 3, 3)), nn.RMSNorm((4, 5)), bn.BatchNorm3d(4), bn.DyT(4),
        bn.FilterResponseNorm(4, learn_eps=True), RMSNorm(4), ChannelAffine(4), bn.make_norm("group", 4),
        bn.make_norm("instance", 4, activation="relu"),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_no_norm_decays(layer):
    decayed, spared = names(nn.Sequential(layer))
    assert decayed == []
    assert len(spared) == len(list(layer.parameters())) > 0


def test_norms_of_others_go_by_their_name():
    class FancyNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))

    class NormLinear(nn.Linear):
        pass

    class LlamaRMSNorm(FancyNorm2d):
        pass

    class Scaling(nn.LayerNorm):
        pass

    assert names(Scaling((3, 4)))[0] == []  # a norm by its kind, whatever its name
    model = nn.Sequential(FancyNorm2d(), NormLinear(4, 4), LlamaRMSNorm())
    assert names(model) == (["1.weight"], ["0.gain", "1.bias", "2.gain"])


def test_biases_of_many_axes():
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    decayed, spared = names(attention)
    assert decayed == ["in_proj_weight", "out_proj.weight"]
    assert set(spared) == {"in_proj_bias", "out_proj.bias", "bias_k", "bias_v"}
    recurrent = nn.LSTM(3, 4)
    assert names(recurrent) == (["weight_ih_l0", "weight_hh_l0"], ["bias_ih_l0", "bias_hh_l0"])

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
            self.unbiased_table = nn.Parameter(torch.zeros(9, 2))

    assert names(Tables()) == (["unbiased_table"], ["relative_position_bias_table"])


def test_weight_norm_new_and_old():
    new = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity())
    new[1] = bn.make_norm("weight", 4, of=new[0], activation="relu")
    decayed, spared = names(new)
    assert decayed == ["0.parametrizations.weight.original1"]
    assert spared == ["0.bias", "0.parametrizations.weight.original0"]
    assert names(new, no_decay="*.original1")[0] == []
    old = nn.Conv2d(3, 4, 3)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(old)
    assert names(old) == (["weight_v"], ["bias", "weight_g"])


def test_other_parametrizations_go_by_their_layer():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    assert names(spectral) == (["parametrizations.weight.original"], ["bias"])

    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    norm = nn.LayerNorm((2, 3))
    nn.utils.parametrize.register_parametrization(norm, "weight", Double())
    assert names(nn.Sequential(norm))[0] == []
    linear = nn.Bilinear(2, 2, 3)
    nn.utils.parametrize.register_parametrization(linear, "bias", Double())
    assert names(nn.Sequential(linear)) == (["0.weight"], ["0.parametrizations.bias.original"])


def test_shared_parameters_once_and_spared_if_any_place_says_so():
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    for model in (nn.Sequential(embedding, head), nn.Sequential(head, embedding)):
        decay, spared = bn.param_groups(model, 0.1)
        assert (len(decay["params"]), len(spared["params"])) == (1, 0)
        decay, spared = bn.param_groups(model, 0.1, decay_embeddings=False)
        assert (len(decay["params"]), len(spared["params"])) == (0, 1)
        decay, spared = bn.param_groups(model, 0.1, no_decay=["1.weight"])
        assert (len(decay["params"]), len(spared["params"])) == (0, 1)
    layer = nn.Linear(3, 3)
    assert names(nn.Sequential(layer, layer)) == (["0.weight"], ["0.bias"])
    torch.optim.SGD(bn.param_groups(nn.Sequential(layer, layer), 0.1), lr=0.1)  # which refuses duplicates


def test_embeddings():
    model = nn.Sequential(nn.Embedding(7, 4), nn.EmbeddingBag(7, 4), nn.Linear(4, 2))
    assert names(model)[0] == ["0.weight", "1.weight", "2.weight"]
    assert names(model, decay_embeddings=False)[0] == ["2.weight"]


def test_no_decay_by_name_pattern_module_and_predicate():
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 3), "header": nn.Linear(3, 3)})
    assert names(model, no_decay="head")[0] == ["body.weight", "header.weight"]
    assert names(model, no_decay="head*")[0] == ["body.weight"]
    assert names(model, no_decay=("body.weight", "header"))[0] == ["head.weight"]
    assert names(model, no_decay={"body.weight"})[0] == ["head.weight", "header.weight"]
    assert names(model, no_decay=lambda name, p: p is model["body"].weight)[0] == ["head.weight", "header.weight"]
    with pytest.raises(
        bn.BatchNormError, match=r"param_groups: no_decay names 'tail', which no parameter .* fits; see"
    ):
        bn.param_groups(model, 0.1, no_decay=["head", "tail"])


def test_frozen_parameters():
    model = nn.Sequential(nn.Linear(3, 4), bn.BatchNorm1d(4))
    model[1].learn = False
    assert names(model) == (["0.weight"], ["0.bias"])
    assert names(model, keep_frozen=True) == (["0.weight"], ["0.bias", "1.weight", "1.bias"])
    assert names(model, no_decay="1") == (["0.weight"], ["0.bias"])  # a frozen name is no mistake
    model.requires_grad_(False)
    with pytest.raises(
        bn.BatchNormError, match=r"no parameter that learns; turn requires_grad on, or .*keep_frozen=True"
    ):
        bn.param_groups(model, 0.1)
    with pytest.raises(bn.BatchNormError, match="ReLU has no parameter that learns; give a model"):
        bn.param_groups(nn.ReLU(), 0.1)


def test_both_groups_are_always_there():
    groups = bn.param_groups(nn.BatchNorm1d(3), 0.1)
    assert [len(group["params"]) for group in groups] == [0, 2]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "no_decay"]


def test_mistakes():
    with pytest.raises(bn.BatchNormError, match=r"weight_decay is -0.1"):
        bn.param_groups(nn.Linear(2, 2), -0.1)
    with pytest.raises(bn.BatchNormError, match=r"0\.weight has no shape yet; run one batch"):
        bn.param_groups(nn.Sequential(nn.LazyLinear(2)), 0.1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_decay_reaches_the_weights_and_nothing_else(optimizer):
    """With gradients of zero, a step moves what is decayed and leaves the rest bit for bit."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4), bn.DyT(4), bn.FilterResponseNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model(torch.randn(2, 3, 6, 6)).sum() * 0).backward()
    optimizer(bn.param_groups(model, 0.1, lr=0.1), lr=7.0).step()
    for name, parameter in model.named_parameters():
        if name == "0.weight":
            torch.testing.assert_close(parameter.detach(), before[name] * 0.99)
        else:
            assert torch.equal(parameter, before[name]), name


def test_decay_of_v_keeps_the_learning_rate():
    """What the docstring says of weight norm: v grows without decay, and does not with it."""
    lengths = {}
    for decay in (0.0, 0.2):
        torch.manual_seed(0)
        layer = nn.Linear(8, 4)
        bn.make_norm("weight", 4, of=layer)
        v = layer.parametrizations.weight.original1
        start = v.norm().item()
        optimizer = torch.optim.SGD(bn.param_groups(layer, decay), lr=0.2)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(layer(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
        lengths[decay] = v.norm().item() / start
    assert lengths[0.0] > 1
    assert lengths[0.2] < 1


class Scales(nn.Module):
    """A layer that is not a norm, with parameters of every number of axes, none of which is called a bias."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.gain = nn.Parameter(torch.ones(4))
        self.table = nn.Parameter(torch.ones(4, 3))
        self.bias_table = nn.Parameter(torch.ones(4, 3))


def test_axes_decide_where_names_say_nothing():
    model = Scales()
    decayed, spared = (group["params"] for group in bn.param_groups(model, 0.1))
    assert [id(p) for p in decayed] == [id(model.table)]
    assert [id(p) for p in spared] == [id(model.temperature), id(model.gain), id(model.bias_table)]
