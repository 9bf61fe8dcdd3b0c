"""`convert` to synchronised layers and back, in one process; the ranks are in `sync_checks`."""

import copy
import pickle

import own_classes
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.layers.channel_norms import BatchNorm
from batchnorm.layers.recurrent_norm import StepBatchNorm
from batchnorm.layers.sync import Synchronised
from batchnorm.transforms.synchronise import synchronised


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def example(layer, *more):
    shape = {nn.BatchNorm1d: (6, 4, 5), nn.BatchNorm2d: (6, 4, 3, 3), nn.BatchNorm3d: (6, 4, 2, 2, 2)}
    return torch.randn(next((s for kind, s in shape.items() if isinstance(layer, kind)), (6, 4, 3, 3)))


LAYERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4, momentum=None),
    "BatchNorm3d": lambda: nn.BatchNorm3d(4, affine=False),
    "untracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "ours": lambda: bn.BatchNorm2d(4, activation="relu", statistics="batch"),
    "Polite": lambda: own_classes.Polite(4),
    "half": lambda: own_classes.NormAct(4).bfloat16(),
    **{kind.__name__: (lambda kind=kind: kind(4)) for kind in own_classes.KEPT},
}


def run(layer, x):
    out = layer(x.to(layer.weight.dtype if layer.weight is not None else x.dtype))
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", LAYERS)
def test_there_and_back(name):
    layer = LAYERS[name]()
    model = nn.Sequential(nn.Identity(), layer)
    synced, report = bn.convert(model, "sync")
    assert type(model[1]) is type(layer)
    assert report.paths == ("1",)
    assert not report.left
    assert isinstance(synced[1], Synchronised)
    assert isinstance(synced[1], bn.SyncBatchNorm)
    assert isinstance(synced[1], type(layer))
    assert type(synced[1]).__name__ == f"Sync{type(layer).__name__}"
    back, again = bn.convert(synced, "batch")
    assert type(back[1]) is type(layer)
    assert again.paths == ("1",)
    assert vars(back[1]).keys() == vars(layer).keys()
    x = example(layer)
    for training in (True, True, False):
        model.train(training)
        synced.train(training)
        for a, b in zip(run(synced[1], x), run(layer, x), strict=True):
            torch.testing.assert_close(a, b)
    for (key, a), (_, b) in zip(synced.state_dict().items(), model.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=key)


@pytest.mark.parametrize("kind", own_classes.LEFT)
def test_a_class_that_cannot_be_synchronised_is_left_with_the_reason(kind):
    model, report = bn.convert(nn.ModuleDict({"norm": kind(4), "plain": nn.BatchNorm2d(4)}), "sync")
    assert type(model["norm"]) is kind
    assert report.paths == ("plain",)
    assert own_classes.LEFT[kind] in report.left["norm"]
    assert kind.__name__ in str(report)


def test_layers_with_statistics_of_their_own_are_left():
    model = nn.ModuleDict({"ghost": bn.GhostBatchNorm(4), "split": bn.SplitBatchNorm(4, 2), "re": bn.BatchRenorm(4)})
    _, report = bn.convert(model)
    assert set(report.left) == set(model)
    assert all("statistics of its own" in reason for reason in report.left.values())


def test_a_frozen_layer_is_left():
    _, report = bn.convert(nn.ModuleDict({"frozen": bn.FrozenBatchNorm(4), "steps": StepBatchNorm(4)}))
    assert "it is frozen" in report.left["frozen"]
    assert "every time step" in report.left["steps"]


def test_a_masked_layer_is_converted_untried():
    layer = bn.MaskedBatchNorm(4)
    synced, report = bn.convert(nn.Sequential(layer))
    assert not report.left
    x, lengths = torch.randn(3, 4, 5), torch.tensor([5, 2, 1])
    torch.testing.assert_close(synced[0](x, lengths), layer(x, lengths))


def test_what_else_is_left():
    model = nn.ModuleDict({"lazy": nn.LazyBatchNorm2d(), "sync": bn.SyncBatchNorm(4), "group": nn.GroupNorm(1, 4)})
    _, report = bn.convert(model, inplace=True)  # torch does not copy a lazy layer
    assert report.changes == ()
    assert "run the model once" in report.left["lazy"]
    assert report.left["sync"] == "it is synchronised already"
    assert "group" not in report.left
    _, report = bn.convert(nn.ModuleDict({"bn": nn.BatchNorm2d(4)}), "batch")
    assert report.left == {"bn": "it is not synchronised"}

    class Special(bn.SyncBatchNorm):
        pass

    class TorchSpecial(nn.SyncBatchNorm):
        pass

    assert "a custom class" in bn.convert(nn.Sequential(Special(3)), "batch")[1].left["0"]
    assert "cannot be replaced" in bn.convert(nn.Sequential(TorchSpecial(3)))[1].left["0"]


def test_torchs_own_and_one_that_was_made_synchronised():
    model = nn.ModuleDict({"torch": nn.SyncBatchNorm(4), "ours": bn.SyncBatchNorm(4, activation="relu")})
    synced, report = bn.convert(model, "sync")
    assert report.paths == ("torch",)
    assert type(synced["torch"]) is bn.SyncBatchNorm
    assert "process_group" not in vars(synced["torch"])
    x = torch.randn(5, 4, 3)
    torch.testing.assert_close(synced["torch"](x), nn.BatchNorm1d(4)(x))
    for source in (synced, model):
        plain, report = bn.convert(source, "batch")
        assert report.paths == ("torch", "ours")
        assert type(plain["torch"]) is type(plain["ours"]) is BatchNorm
        torch.testing.assert_close(plain["ours"](x), torch.relu(nn.BatchNorm1d(4)(x)))
        torch.testing.assert_close(plain["torch"](x).detach().mean((0, 2)), torch.zeros(4), atol=1e-6, rtol=0)


def test_in_place_or_not():
    model = nn.Sequential(nn.BatchNorm2d(4))
    layer = model[0]
    same, _ = bn.convert(model, "sync", inplace=True)
    assert same is model
    assert model[0] is layer
    assert isinstance(layer, bn.SyncBatchNorm)
    alone, report = bn.convert(nn.BatchNorm2d(4))
    assert isinstance(alone, bn.SyncBatchNorm)
    assert report.paths == ("",)


def test_hooks_parameters_and_sharing_stay():
    layer = nn.BatchNorm2d(4)
    model = nn.ModuleList([layer, layer])
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    optimiser = torch.optim.SGD(layer.parameters(), 1.0)
    model, report = bn.convert(model, inplace=True)
    assert report.paths == ("0",)
    assert model[0] is model[1]
    model[0](torch.randn(3, 4, 2, 2)).pow(3).sum().backward()
    before = layer.weight.detach().clone()
    optimiser.step()
    assert seen == [1]
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["BatchNorm2d", "NormAct", "ours"])
def test_copies_and_pickles(name):
    synced, _ = bn.convert(nn.Sequential(LAYERS[name]()))
    x = example(synced[0])
    expected = copy.deepcopy(synced)(x)
    for twin in (copy.deepcopy(synced), pickle.loads(pickle.dumps(synced))):
        assert type(twin[0]) is type(synced[0])
        torch.testing.assert_close(twin(x), expected)
        assert type(bn.convert(twin, "batch")[0][0]) is type(LAYERS[name]())


def test_trying_leaves_no_trace():
    layer = own_classes.NormAct(4, drop=lambda: nn.Dropout(0.5))
    state = copy.deepcopy(layer.state_dict())
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    _, report = bn.convert(nn.Sequential(layer))
    assert not report.left
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), layer.state_dict().values(), strict=True))
    assert layer.training
    assert layer.drop.training


def test_messages_know_the_path():
    synced, _ = bn.convert(nn.ModuleDict({"block": nn.Sequential(nn.BatchNorm2d(4))}))
    assert synced["block"][0]._path == "block.0"


def test_the_class_is_made_once():
    assert synchronised(nn.BatchNorm2d) is synchronised(nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gost",), "there is no norm 'gost'; did you mean 'ghost'"),
        (("sync", "group"), "process_group is 'group'"),
        (("batch", "group"), "plain layers have no process_group"),
    ],
)
def test_bad_arguments(arguments, words):
    to, *group = arguments
    with pytest.raises(bn.BatchNormError, match=words):
        bn.convert(nn.BatchNorm2d(4), to, process_group=group[0] if group else None)
